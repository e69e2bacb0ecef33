"""``python -m tests.cuda.report``: launches and waits of a step by configuration, as Markdown."""

import argparse

from tests.cuda.configurations import THREADS, Measured, measure

HEAD = """
| configuration | buckets | launches | with overlap | waits | with overlap: hook | exchange | main |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def row(name: str, alone: Measured | str, overlap: Measured | str) -> str:
    """Return the line of a configuration."""
    if isinstance(alone, str) or isinstance(overlap, str):
        return f"| {name} | {alone if isinstance(alone, str) else overlap} |"
    launches = [sum(measured.launches.values()) for measured in (alone, overlap)]
    cells = [name, alone.buckets, *launches, sum(alone.waits()), *overlap.waits()]
    return f"| {' | '.join(map(str, cells))} |"


def details(name: str, measured: Measured | str) -> list[str]:
    """Return lines about what a step launches, and where it waits."""
    if isinstance(measured, str):
        return []
    most = sorted(measured.launches.items(), key=lambda item: -item[1])
    lines = [f"{name}: {', '.join(f'{count} {operation}' for operation, count in most)}"]
    for thread in THREADS:
        if places := measured.places(thread):
            lines.append(f"    {thread}: {places}")
    return lines + [f"    {fault}" for fault in measured.faults]


def table(found: dict[tuple[str, bool], Measured | str]) -> str:
    """Return the table of what :func:`measure` has found."""
    names = dict.fromkeys(name for name, _ in found)
    rows = (row(name, found[name, False], found[name, True]) for name in names)
    return "\n".join([HEAD.strip(), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--details", action="store_true", help="operations, and places of waits, below the table"
    )
    arguments = parser.parse_args()
    found = measure()
    print(table(found))
    if arguments.details:
        for (name, overlap), measured in found.items():
            print("\n".join(["", *details(f"{name}{', overlap' * overlap}", measured)]))


if __name__ == "__main__":
    main()
