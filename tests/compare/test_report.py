"""The page that compares runs, as a browser shows it."""

import re
import shutil
from pathlib import Path

import pytest

from dlion.suite.compare.report import main
from dlion.suite.record.studies import PACKED, add_to_packed, find_runs
from tests.compare.runs import write_run
from tests.conftest import ROOT

HOSTILE = "<script>document.title='broken'</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Three methods, one with a name from a hostile place, and a run without evaluation."""
    root = tmp_path_factory.mktemp("report")
    for seed in (0, 1, 2):
        for lr in (1e-3, 1e-2):
            write_run(root / "runs", "dlion_mavo", seed, lr=lr)
        write_run(root / "runs", "g_lion", seed)
    write_run(root / "runs" / "other", "dlion_mavo", 0, method_name=HOSTILE)
    write_run(root / "runs", "dgc", 0)
    (root / "runs" / "curves.png").write_bytes(b"a picture")
    (root / "runs" / "dgc-0-0.001" / "metrics.jsonl").write_text('{"step": 1, "seconds": 0.1}\n')
    file = root / "page" / "report.html"
    main([str(root / "runs"), "-o", str(file), "--title", "Two & two"])
    return file


def test_the_page_stands_alone(page):
    text = page.read_text()
    assert "<script src=" not in text and "<link" not in text
    assert "<title>Two &amp; two</title>" in text
    assert "11 runs" in text and "dgc-0-0.001" in text
    for scope in ("col", "row"):
        assert f'<th scope="{scope}">' in text
    headless = re.findall(r"<th(?! scope)[ >]|<table[^>]*>(?!\s*<caption>)", text)
    assert not headless and "<noscript><p>" in text
    assert re.search(r"<dt>date</dt><dd>\d{4}-\d\d-\d\d<", text)  # that of the files
    assert "<dt>steps</dt><dd>1, 20</dd>" in text and "<dt>seeds</dt><dd>0, 1, 2</dd>" in text
    folders = re.findall('<a href="([^#"]+)">', text)
    assert folders == ["../runs/", "../runs/other/"]
    assert all((page.parent / folder).is_dir() for folder in folders)
    assert re.findall('<noscript><img src="([^"]+)" alt=', text) == ["../runs/curves.png"]
    assert re.search(r'"hovertext":\["[\d.]+, 71\.00 \(\+1\.00 \\u002f -1\.00\) g_lion"\]', text)


def test_each_study_has_a_section(tmp_path, command):
    write_run(tmp_path / "runs", "g_lion", 0)
    for study in ("one", "two"):
        (tmp_path / study).mkdir()
        add_to_packed(tmp_path / study / PACKED, [("run", find_runs([tmp_path / "runs"])[0])])
    page = tmp_path / "report.html"
    assert command(main, tmp_path, "-o", page).returncode == 0
    headings = re.findall("<h2>(.*)</h2>", page.read_text())
    assert headings == ["m on d", "one: m on d", "two: m on d"]


def test_runs_that_were_never_evaluated_together_are_named(tmp_path, command):
    for method, seeds in (("g_lion", (0,)), ("dgc", (0, 1))):
        for seed in seeds:
            write_run(tmp_path / "runs", method, seed)
    file = tmp_path / "runs" / "dgc-1-0.001" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"step": 10', '"step": 7').replace(": 20", ": 15"))
    page = tmp_path / "report.html"
    assert command(main, tmp_path, "-o", page).returncode == 0
    (names,) = re.findall("at the same step: (.*)</p>", page.read_text())
    assert names.count("dgc-") == 2 and "g_lion" not in names
    assert re.findall('<th scope="row">(.*?)</th>', page.read_text())[0] == "g_lion"


def test_every_method_has_a_mark(tmp_path, command):
    methods = [file.stem for file in (ROOT / "conf" / "optimizer").glob("*.yaml")]
    for method in methods:
        write_run(tmp_path / "runs", method, 0)
    page = tmp_path / "report.html"
    assert command(main, tmp_path, "-o", page).returncode == 0
    assert set(methods) <= set(re.findall('<th scope="row">(.*?)</th>', page.read_text()))


def test_what_diverged_is_last(tmp_path, command):
    write_run(tmp_path / "runs", "dgc", 0, better=float("nan"))
    write_run(tmp_path / "runs", "g_lion", 0)
    page = tmp_path / "report.html"
    command(main, tmp_path, "-o", page)
    rows = re.findall("<tr data-tags.*", page.read_text())
    assert "g_lion" in rows[0] and "dgc" in rows[1]
    assert "<td>diverged</td>" in rows[1] and "nan" not in rows[1]


def test_what_is_wrong_is_said(tmp_path, command):
    run = command(main, tmp_path / "nothing")
    assert run.returncode == 2 and "is not a directory" in run.stderr


@pytest.fixture(scope="module")
def browser():
    driver = shutil.which("chromedriver")
    if driver is None or shutil.which("chromium") is None:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def contrast(browser, selector: str) -> float:
    """Return the contrast of a text to the page, as WCAG 2 counts it."""
    script = """
    const style = getComputedStyle(document.querySelector(arguments[0]));
    return [style.color, style.opacity, getComputedStyle(document.body).backgroundColor]"""
    ink, opacity, paper = browser.execute_script(script, selector)
    assert opacity == "1"
    brightness = []
    for colour in (ink, paper):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        brightness.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(brightness) + 0.05) / (min(brightness) + 0.05)


def lines(browser) -> int:
    return len(browser.find_elements("css selector", ".scatterlayer .trace"))


@pytest.mark.browser
def test_a_browser_draws_it_and_filters_work(page, browser):
    browser.set_window_size(1280, 1000)
    browser.get(page.as_uri())
    assert browser.title == "Two & two"
    assert HOSTILE in browser.find_element("tag name", "body").text
    rows = browser.find_elements("css selector", "table.values tbody tr")
    drawn = lines(browser)
    assert len(rows) == 4 and drawn >= 12  # points and lines of four figures, with bands
    plots = "[...document.querySelectorAll('.plotly-graph-div')]"
    buttons = (
        f"{plots}.flatMap(p => [...p.querySelectorAll('.modebar-btn')].map(b => b.dataset.title))"
    )
    titles = set(browser.execute_script(f"return {buttons}"))
    assert "Download plot as a PNG" in titles
    assert not [t for t in titles if re.search("(?i)share|cloud|upload|send|edit", t)], titles
    settings = f"{plots}.map(p => [p._context.plotlyServerURL, p._context.showSendToCloud])"
    assert all(pair == ["", False] for pair in browser.execute_script(f"return {settings}"))
    described = browser.find_elements("css selector", "figure [role='img'][aria-label]")
    assert len(described) == len(browser.find_elements("css selector", "figure")) == 4
    # sent bytes are counted; accuracies of one seed have no spread to be outside of; times vary
    starred = browser.find_elements("css selector", "td.best")
    assert {cell.text for cell in starred} == {"16.0 kB", "31.5x"}
    for colour in ("dark", "light"):
        feature = {"name": "prefers-color-scheme", "value": colour}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        for part in ("p", "caption", ".filters label:nth-of-type(2)", "td", "a"):
            assert contrast(browser, part) >= 4.5, (colour, part)
    for value, hidden in (("g_lion", 1), ("0.01", 1), ("dlion_mavo", 2)):  # methods and settings
        box = browser.find_element("css selector", f"input[value='{value}']")
        box.click()
        assert [row.is_displayed() for row in rows].count(False) == hidden, value
        assert lines(browser) < drawn
        words = browser.find_element("css selector", ".count").text
        assert words == f"{4 - hidden} of 4 curves are shown"
        assert contrast(browser, "label:has(input:not(:checked))") >= 4.5
        stars = browser.find_elements("css selector", "td.best")
        assert all(star.is_displayed() for star in stars)
        box.click()
        assert all(row.is_displayed() for row in rows) and lines(browser) == drawn
    browser.find_element("css selector", "button[data-all='']").click()
    assert lines(browser) == 0
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.browser
def test_it_fits_a_phone_and_paper(page, browser):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True},
    )
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    for plot in browser.find_elements("css selector", ".main-svg"):
        assert plot.size["width"] <= 390
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {
            "width": 700,
            "height": 1000,
            "deviceScaleFactor": 1,
            "mobile": False,
        },  # A4 in its margins
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 700
    for element in browser.find_elements("css selector", ".main-svg, table"):
        assert element.rect["x"] + element.rect["width"] <= 700
    for frame in browser.find_elements("css selector", ".figures [role=img]"):
        drawn = frame.find_element("css selector", ".svg-container").rect["height"]
        assert frame.rect["height"] < drawn + 20  # no blank paper below it
    colours = browser.find_elements("css selector", ".filters i")
    assert colours and all(colour.is_displayed() for colour in colours)  # they are the legend


def test_a_study_comes_before_those_in_its_folder(tmp_path):
    write_run(tmp_path / "runs", "g_lion", 0)
    for place in ("a_part", "."):
        folder = tmp_path / "board" / place
        folder.mkdir(parents=True, exist_ok=True)
        add_to_packed(folder / PACKED, [("run", run) for run in find_runs([tmp_path / "runs"])])
    main([str(tmp_path / "board"), "-o", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    assert text.index("board: m on d") < text.index("a_part: m on d")
