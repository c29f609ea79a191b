"""The report in a browser: drawn, readable on a phone, in the dark, on paper; nothing is loaded."""

import io

import numpy as np
import pytest
from PIL import Image

from jaxpar.report.__main__ import ReportOptions, report
from tests.report.chromium import Chromium
from tests.report.folders import write_loads, write_run

#: By id, of a run that has everything.
CHARTS = """loss last-half grad-norm learning-rate tokens-per-second-per-device mfu memory-gib
data-wait-seconds expert-loads fullest-experts step-time progress goodput""".split()

NARROW, WIDE = 360, 1280


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_run(folder / "first")
    write_run(folder / "second", seed=1, **{"optimizer.learning_rate": 1e-3})
    write_loads(folder / "second", range(20, 201, 20))
    runs = (str(folder / "first"), str(folder / "second"))
    report(ReportOptions(runs=runs, output=str(folder / "report.html")))
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


def picture(png: bytes) -> np.ndarray:
    """Its pixels [rows, columns, 3]."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("dark", [False, True])
def test_it_is_drawn_without_complaint_or_request(browser, page, width, dark):
    browser.open(page, width, dark=dark)
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]
    assert browser.value("document.documentElement.scrollWidth") <= width
    boxes = browser.value(
        "[...document.querySelectorAll('figure')].map(f => {"
        "const b = f.querySelector('svg').getBoundingClientRect();"
        "return [f.id, b.width, b.height, b.right]})"
    )
    assert [name for name, *_ in boxes] == CHARTS
    assert all(w > 0.8 * min(width, 500) and h > 10 and r <= width for _, w, h, r in boxes)
    smallest = browser.value(
        "Math.min(...[...document.querySelectorAll('svg text')].filter(t => t.getBBox().width)"
        ".map(t => parseFloat(getComputedStyle(t).fontSize)"
        " * t.ownerSVGElement.getBoundingClientRect().width / 560))"
    )
    assert smallest >= 9  # pixels: it can be read
    pixels = picture(browser.screenshot())
    assert pixels.shape[1] == width
    paper = np.median(pixels, axis=(0, 1))
    assert (paper.max() < 60) if dark else (paper.min() > 230)
    colorful = np.ptp(pixels.astype(int), axis=2) > 60
    assert 0.002 < colorful.mean() < 0.5  # lines, on paper


def test_the_pointer_shows_values(browser, page):
    browser.open(page, WIDE)
    browser.value("document.querySelector('#loss').scrollIntoView()")
    chart = "document.querySelector('#loss svg').getBoundingClientRect()"
    left, top, width = (browser.value(f"{chart}.{name}") for name in ("left", "top", "width"))
    assert browser.value("document.querySelector('#loss .tip').hidden")
    browser.move(left + width * 0.5, top + 50)
    shown = browser.value("document.querySelector('#loss .tip').textContent").splitlines()
    assert shown[0].startswith("step ") and 80 < int(shown[0].split()[1]) < 120
    assert [line.split()[0].rpartition("/")[2] for line in shown[1:]] == ["first"] * 2 + [
        "second"
    ] * 2
    assert 2.5 < float(shown[1].split()[-1]) < 3.5
    browser.move(5, 5)
    assert browser.value("document.querySelector('#loss .tip').hidden")


def ticks(browser, metric: str = "loss") -> list[str]:
    """The labels of a chart's horizontal axis."""
    found = f"[...document.querySelectorAll('#{metric} .xlabel')].map(t => t.textContent)"
    return browser.value(found)


def heights(browser) -> list[str]:
    return browser.value("[...document.querySelectorAll('#loss .ylabel')].map(t => t.textContent)")


def click(browser, selector: str) -> None:
    browser.value(f"document.querySelector({selector!r}).click()")


def count(browser, selector: str) -> int:
    return browser.value(f"document.querySelectorAll({selector!r}).length")


def test_tokens_and_hours_instead_of_steps(browser, page):
    browser.open(page, WIDE)
    assert ticks(browser) == ["0", "50", "100", "150", "200"]
    click(browser, "#view-tokens")
    assert ticks(browser)[-1] == "1.5M"
    assert browser.value("document.querySelector('#loss .xname').textContent") == "tokens"
    click(browser, "#view-hours")
    assert ticks(browser)[-1] == "1" and "x=hours" in browser.value("location.hash")
    assert browser.complaints() == []


def test_what_is_drawn_again_is_what_came(browser, page):
    """Over steps, with the smoothing that the page has: each line of each chart, to a pixel."""
    paths = (
        "[...document.querySelectorAll('figure svg[data-metric]')].map(s => "
        "[...s.querySelectorAll('path.line, path.raw, path.band')].map(p => "
        "[p.getAttribute('class').trim(), ...p.getAttribute('d').match(/-?[0-9.]+/g).map(Number)]))"
    )
    browser.open(page, WIDE)
    before = browser.value(paths)
    browser.value("drawAll()")
    after = browser.value(paths)
    assert len(before) >= 8 and [len(c) for c in before] == [len(c) for c in after]
    flat = lambda charts: [line for lines in charts for line in lines]  # noqa: E731
    for line, again in zip(flat(before), flat(after), strict=True):
        assert line[0] == again[0]
        np.testing.assert_allclose(line[1:], again[1:], atol=1.0)


def test_smoothing_runs_and_logarithms(browser, page):
    browser.open(page, WIDE)
    line = "document.querySelector('#loss path.line').getAttribute('d')"
    before = browser.value(line)
    change = "const s = document.querySelector('#smooth'); s.value = 20; "
    browser.value(f"{change} s.dispatchEvent(new Event('input'))")
    assert browser.value(line) != before
    assert browser.value("document.querySelector('#smooth-told').textContent") == "20% of the run"
    plain = heights(browser)
    click(browser, "#logy")
    assert heights(browser) != plain and "5" in heights(browser)
    shown = count(browser, "#loss path.line")
    click(browser, "input[data-run='0']")
    assert count(browser, "#loss path.line") == shown // 2 and not count(browser, "#loss .line.r0")
    click(browser, "input[data-run='1']")
    assert browser.value("document.querySelector('#loss text').textContent") == "no run is selected"
    assert browser.value("location.hash") == "#x=steps&smooth=20&logy&off=0,1"
    browser.value("location.reload()")
    assert browser.complaints() == []


def test_zoom_by_pointer_and_by_keys(browser, page):
    browser.open(page, WIDE)
    browser.value("document.querySelector('#loss').scrollIntoView()")
    box = "document.querySelector('#loss svg').getBoundingClientRect()"
    left, top, width = (browser.value(f"{box}.{name}") for name in ("left", "top", "width"))
    pixel = width / 560
    at = lambda share: left + (58 + share * (548 - 58)) * pixel  # noqa: E731
    mouse = {"button": "left", "buttons": 1, "clickCount": 1, "y": top + 60}
    for kind, share in (("Pressed", 0.49), ("Moved", 0.6), ("Moved", 0.76), ("Released", 0.76)):
        browser.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=at(share), **mouse)
    assert ticks(browser) == ["100", "110", "120", "130", "140", "150"]
    assert ticks(browser, "mfu") == ticks(browser)  # all charts
    assert not browser.value("document.querySelector('#reset').disabled")
    press = lambda key: browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)  # noqa: E731
    browser.value("document.querySelector('#loss svg').focus()")
    press("ArrowRight")
    assert not browser.value("document.querySelector('#loss .tip').hidden")
    press("Escape")
    assert ticks(browser) == ["0", "50", "100", "150", "200"]
    browser.value("document.querySelector('#loss svg').focus()")
    press("+")
    assert ticks(browser)[0] == "60" and ticks(browser)[-1] == "140"
    click(browser, "#reset")
    assert ticks(browser)[-1] == "200" and browser.complaints() == []


def test_the_address_keeps_what_was_chosen(browser, page, tmp_path):
    """As a page that reads its file again."""
    copy = tmp_path / "report.html"
    copy.write_bytes(page.read_bytes())
    chosen = "#x=tokens&smooth=0&logx&off=1,99&zoom=100000,500000"
    browser.open(copy, NARROW, fragment=chosen)
    assert browser.value("document.querySelector('#view-tokens').checked")
    assert not browser.value("document.querySelector('input[data-run=\\'1\\']').checked")
    assert browser.value("document.querySelector('#logx').checked")
    assert ticks(browser) == ["100k", "200k", "500k"] and browser.complaints() == []


def test_it_can_be_printed(browser, page):
    browser.open(page, WIDE, dark=True)
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
