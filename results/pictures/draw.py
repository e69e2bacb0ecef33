"""Take the pictures of this folder: what a person sees at the terminal and on the page.

    python results/pictures/draw.py

Help and a run are recorded in a pseudo terminal, the page is photographed in a browser
(apt-get install chromium chromium-driver).
"""

import argparse
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 120
RUN = ["optimizer=dlion_mavo", "workers=8", "steps=400", "logger=none"]


def recorded(command: list[str], cwd: Path) -> str:
    """Return what a command shows on a terminal, with its colours; no line is overwritten."""
    terminal, child = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdout=child, stderr=child, cwd=cwd, env=os.environ | size):
        os.close(child)
        shown = b""
        try:
            while more := os.read(terminal, 1 << 16):
                shown += more
        except OSError:  # it has ended
            pass
    os.close(terminal)
    lines = shown.decode().replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines).strip("\n")


def draw_terminal(arguments: list[str], file: Path) -> None:
    """Draw a call of train.py, typed in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        text = recorded([sys.executable, str(ROOT / "train.py"), *arguments], Path(folder))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"{text}\n"))
    title = f"python train.py {' '.join(arguments)}"
    svg = console.export_svg(title=title, unique_id=file.stem)
    fonts_from_elsewhere = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
    file.write_text(fonts_from_elsewhere.sub("", svg))


def photograph(results: Path, study: str, folder: Path) -> None:
    """Photograph a study's section of the page, in light and in dark."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with tempfile.TemporaryDirectory() as place, webdriver.Chrome(options, service) as browser:
        page = Path(place) / "report.html"
        command = [sys.executable, "-m", "dlion", "report", str(results), "-o", str(page)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for colour in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": colour}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            browser.set_window_size(1200, 1100)
            browser.get(page.as_uri())
            heading = browser.find_element("xpath", f"//h2[contains(., '{study}')]")
            browser.execute_script("arguments[0].scrollIntoView()", heading)
            browser.save_screenshot(str(folder / f"page_{colour}.png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent, metavar="DIR")
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR")
    parser.add_argument("--study", default="unlike_cifar10", help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=["help", "run", "page"])
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    wanted = options.only or ["help", "run", "page"]
    if "help" in wanted:
        draw_terminal(["--help"], options.output / "help.svg")
    if "run" in wanted:
        draw_terminal(RUN, options.output / "run.svg")
    if "page" in wanted:
        photograph(options.results, options.study, options.output)


if __name__ == "__main__":
    main()
