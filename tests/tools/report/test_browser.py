"""The report in a browser: drawn, readable on a phone, in the dark, on paper; nothing is loaded."""

import io
import re

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from jaxpar.tools.report.command import report
from jaxpar.tools.report.options import ReportOptions
from tests.tools.report.folders import write_layers, write_loads, write_run

#: By id, of a run that has everything.
CHARTS = """loss last-half grad-norm learning-rate tokens-per-second-per-device mfu memory-gib
data-wait-seconds expert-loads fullest-experts layers-layer_grad_norm layers-own
step-time progress goodput""".split()

NARROW, WIDE = 360, 1280


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_run(folder / "first")
    write_run(folder / "second", seed=1, **{"optimizer.learning_rate": 1e-3})
    write_loads(folder / "second", range(20, 201, 20))
    write_layers(folder / "second", range(10, 201, 10), lambda step, layer: step * (layer + 1.0))
    own = lambda step, layer: None if layer == 1 else -1.0 - layer  # noqa: E731
    for run in ("first", "second"):
        write_layers(folder / run, range(10, 201, 10), own, name="own", layers=3)
    runs = (str(folder / "first"), str(folder / "second"))
    report(ReportOptions(runs=runs, output=str(folder / "report.html")))
    return folder / "report.html"


def picture(png: bytes) -> np.ndarray:
    """Its pixels [rows, columns, 3]."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


@pytest.mark.waits
@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("dark", [False, True])
def test_it_is_drawn_without_complaint_or_request(show, file, width, dark):
    shown = show(file, width, dark=dark)
    page = shown.page
    expect(page.locator("figure:has(svg)")).to_have_count(len(CHARTS))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.evaluate(
        "[...document.querySelectorAll('figure')].map(f => {"
        "const b = f.querySelector('svg').getBoundingClientRect();"
        "return [f.id, b.width, b.height, b.right]})"
    )
    assert [name for name, *_ in boxes] == CHARTS
    assert all(w > 0.8 * min(width, 500) and h > 10 and r <= width for _, w, h, r in boxes)
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('svg text')].filter(t => t.getBBox().width)"
        ".map(t => parseFloat(getComputedStyle(t).fontSize)"
        " * t.ownerSVGElement.getBoundingClientRect().width / 560))"
    )
    assert smallest >= 9  # pixels: it can be read
    pixels = picture(page.screenshot(full_page=True))
    assert pixels.shape[1] == width
    paper = np.median(pixels, axis=(0, 1))
    assert (paper.max() < 60) if dark else (paper.min() > 230)
    colorful = np.ptp(pixels.astype(int), axis=2) > 60
    assert 0.002 < colorful.mean() < 0.5  # lines, on paper
    assert shown.complaints == []
    assert shown.requests == [file.as_uri()]


def place(page: Page) -> tuple[float, float, float]:
    """Left, top and width of the chart of the loss, in the window."""
    chart = page.locator("#loss svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    return box["x"], box["y"], box["width"]


@pytest.mark.waits
def test_the_pointer_shows_values(show, file):
    page = show(file, WIDE).page
    tip = page.locator("#loss .tip")
    left, top, width = place(page)
    expect(tip).to_be_hidden()
    page.mouse.move(left + width * 0.5, top + 50)
    expect(tip).to_be_visible()
    shown = tip.text_content().splitlines()
    assert shown[0].startswith("step ") and 80 < int(shown[0].split()[1]) < 120
    names = [line.split()[0].rpartition("/")[2] for line in shown[1:]]
    assert names == ["first"] * 2 + ["second"] * 2
    assert 2.5 < float(shown[1].split()[-1]) < 3.5
    page.mouse.move(5, 5)
    expect(tip).to_be_hidden()


@pytest.mark.waits
def test_the_pointer_shows_the_value_of_a_layer(show, file):
    shown = show(file, WIDE)
    page, figure = shown.page, shown.page.locator("#layers-layer_grad_norm")
    chart, tip = figure.locator("svg"), figure.locator(".tip")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    pixel = box["width"] / 560
    at = lambda step: box["x"] + (58 + 490 * step / 200) * pixel  # noqa: E731
    page.mouse.move(at(95), box["y"] + (16 + 2.5 * 16) * pixel)
    expect(tip).to_have_text("step 100\nlayer 2  300")
    chart.focus()
    chart.press("ArrowDown")
    expect(tip).to_have_text("step 100\nlayer 3  400")
    expect(chart.locator("path.cells")).not_to_have_count(0)
    fills = chart.locator("path.cells").evaluate_all("all => all.map(p => p.getAttribute('fill'))")
    assert fills[0] == "rgb(68,1,84)" and fills[-1] == "rgb(253,231,37)"  # least and largest
    rows = page.locator("#layers-own svg").nth(1)
    boxes = rows.locator("path.cells").evaluate_all("all => all.map(p => p.getAttribute('d'))")
    assert len(boxes) == 2 and all("M58.0 37.3" not in d for d in boxes)  # one layer has no value
    page.keyboard.press("Escape")
    click(page, "#view-tokens")
    expect(chart.locator(".xname")).to_have_text("tokens")
    click(page, "input[data-run='1']")
    expect(chart.locator("text").first).to_have_text("the run is not selected")
    assert shown.complaints == []


def has_ticks(page: Page, *labels: str, metric: str = "loss") -> None:
    """Wait until a chart's horizontal axis has these labels."""
    expect(page.locator(f"#{metric} .xlabel")).to_have_text(list(labels))


def last_tick(page: Page, label: str) -> None:
    """Wait until the horizontal axis of the loss ends with this label."""
    expect(page.locator("#loss .xlabel").last).to_have_text(label)


ALL_STEPS = ("0", "50", "100", "150", "200")


def click(page: Page, selector: str) -> None:
    """As a click does, wherever the element is; some are drawn as their label."""
    page.locator(selector).dispatch_event("click")


@pytest.mark.waits
def test_tokens_and_hours_instead_of_steps(show, file):
    shown = show(file, WIDE)
    page = shown.page
    has_ticks(page, *ALL_STEPS)
    click(page, "#view-tokens")
    last_tick(page, "1.5M")
    expect(page.locator("#loss .xname")).to_have_text("tokens")
    click(page, "#view-hours")
    last_tick(page, "1")
    expect(page).to_have_url(re.compile("x=hours"))
    assert shown.complaints == []


@pytest.mark.waits
def test_a_line_is_where_its_values_are_on_the_axis(show, file):
    """The last value of the table, and the last point of the line, by the labels of the axis."""
    page = show(file, WIDE).page
    labels = page.locator("#mfu .ylabel").evaluate_all(
        "all => all.map(t => [Number(t.getAttribute('y')), Number(t.textContent)])"
    )
    (low, at_low), (high, at_high) = labels[0], labels[-1]
    path = page.locator("#mfu .line.r1").first.get_attribute("d")
    last = float(re.findall(r"-?[0-9.]+", path)[-1])
    drawn = at_low + (last - low) / (high - low) * (at_high - at_low)
    cells = page.locator("#mfu tbody tr").last.locator("td").all_text_contents()
    assert cells[0] == "200" and drawn == pytest.approx(float(cells[1]), rel=2e-3)


@pytest.mark.waits
def test_the_second_half_has_an_axis_of_its_own(show, file):
    page = show(file, WIDE).page
    has_ticks(page, "120", "140", "160", "180", "200", metric="last-half")


@pytest.mark.waits
def test_progress_is_over_time_with_events(show, file):
    page = show(file, WIDE).page
    expect(page.locator("#progress .xname")).to_have_text("minutes")
    expect(page.locator("#progress .line.r0")).to_have_count(2)  # two attempts
    expect(page.locator("#progress .mark.restart.r0")).to_have_count(1)
    click(page, "#view-tokens")
    expect(page.locator("#progress .xname")).to_have_text("minutes")
    expect(page.locator("#loss .mark.restart.r0")).to_have_count(1)


@pytest.mark.waits
def test_without_the_script_there_are_tables(show, file):
    page = show(file, WIDE, script=False).page
    expect(page.locator("#loss svg")).to_be_hidden()
    page.locator("#loss summary").click()
    expect(page.locator("#loss tbody tr").last).to_contain_text("200")
    page.locator("#layers-layer_grad_norm summary").click()
    cells = page.locator("#layers-layer_grad_norm tbody tr").last.locator("td")
    expect(cells).to_have_text(["3", "40", "800", "40", "800"])


@pytest.mark.waits
def test_smoothing_runs_and_logarithms(show, file):
    shown = show(file, WIDE)
    page = shown.page
    lines = page.locator("#loss path.line")
    before = lines.first.get_attribute("d")
    page.locator("#smooth").fill("20")
    expect(page.locator("#smooth-told")).to_have_text("20% of the run")
    expect(lines.first).not_to_have_attribute("d", before)
    heights = page.locator("#loss .ylabel")
    plain = heights.all_text_contents()
    click(page, "#logy")
    expect(heights).not_to_have_text(plain)
    assert "5" in heights.all_text_contents()
    drawn = lines.count()
    click(page, "input[data-run='0']")
    expect(lines).to_have_count(drawn // 2)
    expect(page.locator("#loss .line.r0")).to_have_count(0)
    click(page, "input[data-run='1']")
    expect(page.locator("#loss text").first).to_have_text("no run is selected")
    expect(page).to_have_url(re.compile(r"#x=steps&smooth=20&logy&off=0,1$"))
    page.reload()
    expect(page.locator("#loss text").first).to_have_text("no run is selected")
    assert shown.complaints == []


@pytest.mark.waits
def test_zoom_by_pointer_and_by_keys(show, file):
    shown = show(file, WIDE)
    page = shown.page
    left, top, width = place(page)
    pixel = width / 560
    at = lambda share: left + (58 + share * (548 - 58)) * pixel  # noqa: E731
    page.mouse.move(at(0.49), top + 60)
    page.mouse.down()
    page.mouse.move(at(0.6), top + 60)
    page.mouse.move(at(0.76), top + 60)
    page.mouse.up()
    for metric in ("loss", "mfu"):  # all charts
        has_ticks(page, "100", "110", "120", "130", "140", "150", metric=metric)
    expect(page.locator("#reset")).to_be_enabled()
    chart = page.locator("#loss svg")
    chart.press("ArrowRight")
    expect(page.locator("#loss .tip")).to_be_visible()
    chart.press("Escape")
    has_ticks(page, *ALL_STEPS)
    chart.press("+")
    expect(page.locator("#loss .xlabel").first).to_have_text("60")
    last_tick(page, "140")
    click(page, "#reset")
    last_tick(page, "200")
    assert shown.complaints == []


@pytest.mark.waits
def test_the_address_keeps_what_was_chosen(show, file, tmp_path):
    """As a page that reads its file again."""
    copy = tmp_path / "report.html"
    copy.write_bytes(file.read_bytes())
    chosen = "#x=tokens&smooth=0&logx&off=1,99&zoom=100000,500000"
    shown = show(copy, NARROW, fragment=chosen)
    page = shown.page
    has_ticks(page, "100k", "200k", "500k")
    expect(page.locator("#view-tokens")).to_be_checked()
    expect(page.locator("input[data-run='1']")).not_to_be_checked()
    expect(page.locator("#logx")).to_be_checked()
    assert shown.complaints == []


@pytest.mark.waits
def test_it_can_be_printed(show, file):
    pdf = show(file, WIDE, dark=True).page.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
