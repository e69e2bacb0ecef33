"""Draw the figures of the documentation: python docs/figures/draw.py."""

import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image

matplotlib.use("svg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
UP, DOWN, INK, QUIET = "#1f77b4", "#d62728", "#222222", "#bbbbbb"
plt.rcParams |= {"svg.hashsalt": "dlion", "font.size": 11, "svg.fonttype": "path"}


def vote() -> None:
    """Three workers' signs, their sum and the majority."""
    rows = {"worker 0": "+-++-+", "worker 1": "++-+--", "worker 2": "-+++-+"}
    sums = [sum(1 if row[i] == "+" else -1 for row in rows.values()) for i in range(6)]
    rows |= {"sum": [f"{s:+d}" for s in sums], "answer": ["+" if s > 0 else "-" for s in sums]}
    axes = _empty(6.4, 2.6)
    for y, (name, signs) in enumerate(rows.items()):
        height = -y - (0.4 if y > 2 else 0)
        axes.text(-0.8, height, name, ha="right", va="center", color=INK)
        for x, sign in enumerate(signs):
            colour = QUIET if name == "sum" else UP if sign == "+" else DOWN
            box = {"boxstyle": "square,pad=0.35", "fc": "white", "ec": colour}
            shown = sign.replace("-", "\N{MINUS SIGN}")
            axes.text(x, height, shown, ha="center", va="center", family="monospace", bbox=box)
    notes = {-1: "1 bit up", -3.4: "counted by the owner", -4.4: "1 bit down"}
    for y, note in notes.items():
        axes.text(5.9, y, note, va="center", color=INK)
    axes.set(xlim=(-2.6, 9), ylim=(-5, 0.6))
    _save("vote")


def exchange() -> None:
    """Messages that one worker of nine sends: directly, and on a grid of three by three."""
    figure, both = plt.subplots(1, 2, figsize=(6.4, 3))
    for axes, title, reached in (
        (both[0], "direct-send: to all", [i for i in range(9) if i != 4]),
        (both[1], "grid: along its row, its column", [1, 3, 5, 7]),
    ):
        axes.axis("off")
        axes.set(title=title, xlim=(-0.5, 2.5), ylim=(-0.5, 2.5), aspect="equal")
        for i in reached:
            style = {"arrowstyle": "->", "color": UP, "shrinkA": 12, "shrinkB": 12}
            axes.annotate("", (i % 3, i // 3), (1, 1), arrowprops=style)
        for i in range(9):
            colour = UP if i == 4 else "white"
            axes.plot(i % 3, i // 3, "o", ms=18, mfc=colour, mec=INK)
    figure.tight_layout()
    _save("exchange")


def overlap() -> None:
    """Two steps on a time line."""
    axes = _empty(6.4, 2.8)
    parts = [
        (0, "computing", [(0, 2, "forward"), (2, 4, "backward"), (9, 1.5, "update")], INK),
        (1, "network", [(6, 1, ""), (7, 1, ""), (8, 1, "")], UP),
        (2.6, "computing", [(0, 2, "forward"), (2, 4, "backward"), (7, 1.5, "update")], INK),
        (3.6, "network", [(3.4, 1, ""), (4.7, 1, ""), (6, 1, "")], UP),
    ]
    for y, name, bars, colour in parts:
        axes.text(-0.2, -y, name, ha="right", va="center", color=INK)
        for start, width, label in bars:
            axes.barh(-y, width, left=start, height=0.7, fc="white", ec=colour, lw=1.5)
            axes.text(start + width / 2, -y, label, ha="center", va="center", fontsize=9)
    axes.text(10.9, -0.5, "overlap=False", va="center")
    axes.text(10.9, -3.1, "overlap=True", va="center")
    axes.set(xlim=(-2.2, 13.8), ylim=(-4.2, 0.6))
    _save("overlap")


def start() -> None:
    """What a run says at its start of pictures, hidden files, notes and a link to nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_pets(folder / "pets")
        words = "dataset=images dataset.path=pets optimizer=dlion_mavo workers=4 batch_size=8"
        train = [sys.executable, str(HERE.parents[1] / "train.py"), *words.split()]
        train += ["logger=none", "steps=20", "output_dir=run"]
        done = subprocess.run(train, cwd=folder, check=True, capture_output=True, text=True)
    lines = [f"$ python train.py {words}", *done.stdout.splitlines()[:10]]
    axes = _empty(9, 0.22 * len(lines))
    for y, line in enumerate(lines):
        colour = DOWN if line.startswith("data ") else INK
        axes.text(0, -y, line, family="monospace", fontsize=9, va="center", color=colour)
    axes.set(xlim=(0, 9), ylim=(-len(lines), 0.6))
    _save("start")


def _write_pets(folder: Path) -> None:
    """Write pictures of two classes, and what folders hold besides."""
    random = np.random.default_rng(0)
    for part, label in ((part, i) for part in ("train", "test") for i in range(2)):
        place = folder / part / ("cats", "dogs")[label]
        place.mkdir(parents=True)
        for i in range(60):
            pixels = random.integers(90 * label, 90 * label + 80, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{i}.jpg")
        (place / ".DS_Store").touch()
    (folder / "train" / "cats" / "notes.txt").touch()
    (folder / "train" / "dogs" / "gone.jpg").symlink_to("nowhere")


def _empty(width: float, height: float) -> plt.Axes:
    _, axes = plt.subplots(figsize=(width, height))
    axes.axis("off")
    return axes


def _save(name: str) -> None:
    plt.savefig(HERE / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close()


if __name__ == "__main__":
    vote()
    exchange()
    overlap()
    start()
