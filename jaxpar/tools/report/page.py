"""Builds the report as one self-contained HTML page, with inline style, script and charts."""

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from xml.etree.ElementTree import Element

import jaxpar
from jaxpar.tools.report import certificates, charts, experts, facts, layers, listing, times
from jaxpar.tools.report.charts import bits_per_nat, hours_of
from jaxpar.tools.report.drawing import line_sign, mark_sign
from jaxpar.tools.report.elements import e, html
from jaxpar.tools.report.runs import KINDS, RunRead

# --------------- The controls above the charts: axes, smoothing, unit, runs. `page.js` acts on them


#: Range of the smoothing slider, in percent of a run. `SMOOTH` of runs.py is the default.
MAX_SMOOTH, DEFAULT_SMOOTH = 30, 2


def bar(runs: Sequence[RunRead]) -> Element:
    """Return all controls but those of runs. Without the script, CSS hides them."""
    views = ["steps"]
    if all(run.tokens_per_step for run in runs):
        views.append("tokens")
    if all(len(hours_of(run)[0]) > 1 for run in runs):
        views.append("hours")
    by = [_radio(view, checked=view == "steps") for view in views]
    choice = e("fieldset", e("legend", "By"), *by)
    slider = {"min": 0, "max": MAX_SMOOTH, "step": 1, "value": DEFAULT_SMOOTH}
    told = e("output", f"{DEFAULT_SMOOTH}% of the run", id="smooth-told")
    smooth = e("label", "Smoothing", e("input", type="range", id="smooth", **slider), told)
    boxes = [_box("logy", "log y"), _box("logx", "log x")]
    if all(bits_per_nat(run) for run in runs):
        boxes.append(_box("bits", "bits per byte"))
    reset = e("button", "Whole run", type="button", id="reset", disabled="")
    help_ = "Drag over a chart to zoom, or use the keys: arrows, +, -, Escape."
    return e(
        "form",
        *(choice, smooth, *boxes, reset, e("small", help_)),
        id="controls",
        class_="choice",
        aria_label="Charts",
    )


def toggle(index: int, run: RunRead, swatch: Element) -> Element:
    """Return the entry of a run in the legend, which shows and hides it."""
    box = e("input", type="checkbox", checked="", **{"data-run": index})
    return e("label", box, swatch, run.name, class_="run")


def _radio(view: str, *, checked: bool) -> Element:
    made = e("input", type="radio", name="view", value=view, id=f"view-{view}")
    if checked:
        made.set("checked", "")
    return e("label", made, view)


def _box(name: str, text: str) -> Element:
    return e("label", e("input", type="checkbox", id=name), text)


#: Kinds of lines and their meaning.
LINES = {
    "line": "mean (loss and gradient norm: smoothed)",
    "band": "range of recorded values",
    "dots": "held-out",
}


def page(runs: Sequence[RunRead], made: datetime, live: int = 0) -> bytes:
    """Build the page.

    Args:     runs: at least one. made: the current time. live: seconds after which the page reads
              its file again; 0: never.
    """
    # Text in a script element is not escaped. Without "<" it cannot close the element.
    data = json.dumps(charts.page_data(runs)).replace("<", "\\u003c")
    script = _asset("draw.js") + _asset("page.js")
    body = e(
        "body",
        _header(runs, made, live),
        e("main", *_sections(runs)),
        e("script", data, type="application/json", id="data"),
        e("script", script),
        **({"data-live": live} if live else {}),
    )
    title = ", ".join(run.name for run in runs)
    return document(f"{title} – training report", body, script)


def document(title: str, body: Element, script: str = "") -> bytes:
    """Build a page that loads nothing.

    Args:     script: the only one that may run.
    """
    style = _asset("page.css")
    head = e(
        "head",
        e("meta", charset="utf-8"),
        e("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        e("meta", name="viewport", content="width=device-width, initial-scale=1"),
        e("meta", name="color-scheme", content="light dark"),
        e("meta", name="referrer", content="no-referrer"),
        e("title", title),
        e("style", style),
    )
    return html(e("html", head, body, lang="en"))


def _asset(name: str) -> str:
    return resources.files("jaxpar.tools.report").joinpath(name).read_text("utf-8")


def _policy(style: str, script: str) -> str:
    """Return a content security policy that allows only this style and script, and no network."""
    digest = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()  # noqa: E731
    return (
        f"default-src 'none'; style-src 'sha256-{digest(style)}'; "
        f"script-src 'sha256-{digest(script)}'; base-uri 'none'; form-action 'none'"
    )


def _header(runs: Sequence[RunRead], made: datetime, live: int) -> Element:
    what = "Training report" if len(runs) == 1 else f"Training report, {len(runs)} runs"
    when = f"{made:%Y-%m-%d %H:%M} {made.tzname() or ''}".strip()
    when += f", read again every {live} s" if live else ""
    return e("header", e("h1", what), e("p", f"{when}, jaxpar {jaxpar.__version__}"))


def _sections(runs: Sequence[RunRead]) -> list[Element]:
    figures = [*charts.line_charts(runs), experts.loads(runs), experts.over_time(runs)]
    figures += [*layers.figures(runs), times.histogram(runs), times.progress(runs)]
    shown = [figure for figure in figures if figure is not None]
    drawn = e("section", class_="charts")
    if not shown:
        drawn.append(e("p", "No steps have been logged yet.", class_="empty"))
    if charts.line_charts(runs):
        drawn.append(bar(runs))
    drawn.append(_marks(runs))
    drawn.append(e("div", *shown, times.goodput(runs), class_="grid"))
    rest = [facts.predicted(runs), facts.section(runs), facts.samples(runs)]
    rest += [certificates.section(runs), facts.config(runs)]
    there = [section for section in rest if section is not None]
    compared = [listing.html_table(runs)] if len(runs) > 1 else []
    return [*compared, facts.cards(runs), drawn, *there, facts.environment(runs)]


def _marks(runs: Sequence[RunRead]) -> Element:
    """Return the legend of the runs' colors and the marks in the charts."""
    made = e("ul", class_="legend")
    if len(runs) > 1:
        for index, run in enumerate(runs):
            made.append(e("li", toggle(index, run, facts.swatch(index))))
    for kind, meaning in LINES.items():
        if kind != "dots" or any("held_out_loss" in run.series for run in runs):
            made.append(e("li", line_sign(kind), meaning))
    there = {mark.kind for run in runs for mark in run.marks}
    for kind, meaning in KINDS.items():
        if kind in there:
            made.append(e("li", mark_sign(kind), meaning))
    return made
