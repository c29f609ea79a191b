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


def test_tokens_instead_of_steps(browser, page):
    browser.open(page, WIDE)
    views = "[...document.querySelectorAll('#loss .view')]"
    shown = f"{views}.filter(v => v.offsetHeight).map(v => v.className)"
    assert browser.value(shown) == ["view by-steps"]
    browser.value("document.querySelector('#view-tokens').click()")
    assert browser.value(shown) == ["view by-tokens"]


def test_it_can_be_printed(browser, page):
    browser.open(page, WIDE, dark=True)
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
