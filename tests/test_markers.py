"""The rules of tests/support/markers.py, in a pytest of their own."""

import pytest

pytest_plugins = ["pytester"]
TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.netns
@pytest.mark.skipif(True, reason="there is no tc")
def test_of_a_network(): pass

@pytest.mark.browser
def test_of_a_page():
    pytest.skip("there is no browser")
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run the tests above with options, where some markers must run; return how many ended how."""

    def run(*options: str, must: str = "") -> dict[str, int]:
        monkeypatch.setenv("DLION_MUST_RUN", must)
        marks = "slow\n netns\n browser\n slurm\n quick"
        pytester.makeini(
            f"[pytest]\naddopts = -p tests.support.markers -p no:xdist -W ignore\nmarkers = {marks}"
        )
        pytester.makepyfile(TESTS)
        result = pytester.runpytest_inprocess(*options)
        run.printed = result.stdout.str()
        return result.parseoutcomes()

    return run


def test_quick_is_what_has_no_other_mark(run):
    assert run("-m", "quick") == {"passed": 1, "deselected": 3}
    assert run("-m", "not quick") == {"passed": 1, "skipped": 2, "deselected": 1}


def test_a_skip_is_a_failure_where_the_marker_must_run(run):
    assert run(must="slurm") == {"passed": 2, "skipped": 2}
    assert run(must="netns slurm") == {"passed": 2, "skipped": 1, "errors": 1}  # while it is set up
    assert "netns tests must run here (DLION_MUST_RUN), but: Skipped: there is no tc" in run.printed
    assert run(must="browser netns slurm") == {"passed": 2, "failed": 1, "errors": 1}
    assert "browser tests must run here (DLION_MUST_RUN), but: Skipped: there is no" in run.printed
