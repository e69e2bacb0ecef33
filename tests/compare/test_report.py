"""The page that compares runs, as a browser shows it."""

import re
import shutil
from pathlib import Path

import pytest

from dlion.compare.report import main
from dlion.record.studies import PACKED, add_to_packed, find_runs
from tests.compare.runs import write_run

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
    (root / "runs" / "dgc-0-0.001" / "metrics.jsonl").write_text('{"step": 1, "seconds": 0.1}\n')
    file = root / "page" / "report.html"
    main([str(root / "runs"), "-o", str(file), "--title", "Two & two"])
    return file


def test_the_page_stands_alone(page):
    text = page.read_text()
    assert "<script src=" not in text and "<link" not in text
    assert "<title>Two &amp; two</title>" in text
    assert "11 runs" in text and "dgc-0-0.001" in text
    assert 'class="best"' in text


def test_each_study_has_a_section(tmp_path, command):
    write_run(tmp_path / "runs", "g_lion", 0)
    for study in ("one", "two"):
        (tmp_path / study).mkdir()
        add_to_packed(tmp_path / study / PACKED, {"run": find_runs([tmp_path / "runs"])[0]})
    page = tmp_path / "report.html"
    assert command(main, tmp_path, "-o", page).returncode == 0
    headings = re.findall("<h2>(.*)</h2>", page.read_text())
    assert headings == ["m on d", "one: m on d", "two: m on d"]


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
    for value, hidden in (("g_lion", 1), ("0.01", 1), ("dlion_mavo", 2)):  # methods and settings
        box = browser.find_element("css selector", f"input[value='{value}']")
        box.click()
        assert [row.is_displayed() for row in rows].count(False) == hidden, value
        assert lines(browser) < drawn
        words = browser.find_element("css selector", ".count").text
        assert words == f"{4 - hidden} of 4 curves are shown"
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
    colours = browser.find_elements("css selector", ".filters i")
    assert colours and all(colour.is_displayed() for colour in colours)  # they are the legend
