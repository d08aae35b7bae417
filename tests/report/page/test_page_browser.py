"""The page in a real browser: no complaint, no request, no sideways scrolling, nothing that only colour says."""

import copy
import json
import shutil

import hostile
import pytest
from made import UNTIMED, read, summarised
from typed import wait_for

from playground import catalog
from playground.report import page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="needs Chromium and its driver (Debian: apt install chromium chromium-driver)"
    ),
]
LONG_NAME = max((variant.name for model in catalog.models() for variant in catalog.variants(model)), key=len)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


# Plots without a title, tables without heads, regions without a name, marks that only colour tells apart.
NAMELESS = """
    const all = selector => [...document.querySelectorAll(selector)];
    return [all('svg').filter(each => !each.querySelector(':scope > title')?.textContent).length,
            all('table').filter(each => !each.querySelector('th[scope]')).length,
            all('.scroll[role=region]').filter(each => !each.ariaLabel).length,
            all('.mark').filter(each => each.textContent.trim().length < 2).length]"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def open_page(browser, file, width, theme):
    """Open a page as wide as that; returns the addresses that were asked for."""
    browser.get("about:blank")
    browser.get_log("performance")
    browser.get_log("browser")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(file.as_uri())
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory, h200, h200_page):
    folder = tmp_path_factory.mktemp("pages")
    (folder / "h200.html").write_text(h200_page, encoding="utf-8")
    renamed = copy.deepcopy(h200)
    for result in renamed["results"]:
        result["variant"] = LONG_NAME
    (folder / "long.html").write_text(page.render(read(renamed), []), encoding="utf-8")
    for result in renamed["results"][:9]:
        path = f"/home/someone/{'long_folder/' * 9}solution_{LONG_NAME}.py"
        result.update(verdict="fail", reason=f"race at {path}:10: two writes", **UNTIMED)
    document = renamed | {"suite": summarised(renamed)}
    (folder / "suite.html").write_text(page.render(read(document), []), encoding="utf-8")
    return folder


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_it_opens_quietly_and_fits(browser, pages, width, theme):
    file = pages / "h200.html"
    assert open_page(browser, file, width, theme) == [file.as_uri()]
    assert browser.get_log("browser") == []
    for opened in ("", "document.querySelectorAll('details').forEach(each => each.open = true);"):
        browser.execute_script(opened)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    blocks = "[...document.querySelectorAll('pre.docstring')]"
    assert browser.execute_script(f"return {blocks}.length") > 10
    assert browser.execute_script(f"return {blocks}.filter(each => each.scrollWidth > each.clientWidth).length") == 0, "cut off"
    assert browser.execute_script(NAMELESS) == [0, 0, 0, 0]
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper.strip("rgb()").split(","))) < 200) == (theme == "dark")


def test_a_link_in_verdicts_opens_its_box_below_the_navigation(browser, pages):
    open_page(browser, pages / "h200.html", 1100, "light")
    place = """
        const link = document.querySelectorAll('.verdicts tbody th a')[12];
        const box = document.getElementById(link.getAttribute('href').slice(1)).parentElement;
        return [box.open, box.getBoundingClientRect().top, document.querySelector('nav').getBoundingClientRect().bottom,
                innerHeight]"""
    assert not browser.execute_script(place)[0]
    browser.execute_script("document.querySelectorAll('.verdicts tbody th a')[12].click()")
    wait_for(lambda: browser.execute_script(place)[0], 10)
    _, top, navigation, height = browser.execute_script(place)
    assert navigation <= top < height / 2, "the navigation stays at the top, and the box lies below it"


@pytest.mark.parametrize("width", [390, 1400])
def test_verdicts_are_sorted_and_filtered(browser, pages, h200, width):
    open_page(browser, pages / "h200.html", width, "light")
    rows = """
        return [...document.querySelectorAll('.verdicts tbody tr')].filter(row => row.offsetParent)
            .sort((one, other) => one.getBoundingClientRect().top - other.getBoundingClientRect().top)
            .map(row => parseFloat(row.querySelector('[data-label=time]').textContent))"""
    times = browser.execute_script(rows)
    assert len(times) == len(h200["results"]) and times != sorted(times)
    browser.execute_script("document.getElementById('by-time').click(); document.getElementById('only-on-GPU').click()")
    times = browser.execute_script(rows)
    assert len(times) == sum(each["ran_on"] == "cuda" for each in h200["results"]) and times == sorted(times)


@pytest.mark.parametrize("name", ["h200", "long", "suite"])
@pytest.mark.parametrize("width", [360, 390, 1100, 1400])
def test_no_verdict_runs_out_of_its_cell(browser, pages, width, name):
    open_page(browser, pages / f"{name}.html", width, "light")
    assert (
        browser.execute_script("""
        const bounds = node => { const range = document.createRange(); range.selectNodeContents(node);
                                 return range.getBoundingClientRect(); };
        return [...document.querySelectorAll('#verdicts .rows tbody td, #verdicts .rows tbody th')].filter(cell => {
            const box = cell.getBoundingClientRect(), text = bounds(cell);
            return cell.textContent.trim() && (text.left < box.left - 1 || text.right > Math.min(box.right + 1, innerWidth));
        }).map(cell => cell.textContent)""")
        == []
    )


def test_a_hostile_page_does_nothing(browser, tmp_path):
    document, _ = hostile.document()
    file = tmp_path / "hostile.html"
    file.write_text(page.render(read(document), []), encoding="utf-8")
    assert open_page(browser, file, 360, "light") == [file.as_uri()]
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.scripts.length + document.images.length") == 0
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
