"""What marks mean: ``quick`` is whatever has no other, and some machines may skip nothing.

DLION_MUST_RUN names the markers, with spaces between them, of tests that may not be skipped: where
the programs that they need were installed for them, a skip hides that they do not work.
"""

import os
from collections.abc import Generator

import pytest

LONGEST = ("test_slurm.py", "test_readmes.py", "test_smoke.py")  # minutes, of the first waiting
NOT_QUICK = ("slow", "netns", "slurm", "browser", "triton")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = set()
    for item in items:
        if any(map(item.get_closest_marker, NOT_QUICK)):
            long.add(item.path)
        else:
            item.add_marker("quick")
    # the long files first, so that the short ones fill up what is left of the workers' time
    items.sort(key=lambda item: (item.path.name not in LONGEST, item.path not in long))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    needed = os.environ.get("DLION_MUST_RUN", "").split()
    broken = [name for name in needed if item.get_closest_marker(name)]
    if report.skipped and not hasattr(report, "wasxfail") and broken:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{broken[0]} tests must run here (DLION_MUST_RUN), but: {reason}"
    return report
