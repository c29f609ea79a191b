"""Builds the report as one self-contained HTML page, with inline style, script and charts."""

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from xml.etree.ElementTree import Element

import jaxpar
from jaxpar.tools.charts.chart import line_sign, mark_sign
from jaxpar.tools.charts.elements import e, html
from jaxpar.tools.report import charts, controls, experts, facts, layers, listing, profiles, times
from jaxpar.tools.report.runs import KINDS, RunRead

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
    style, script = _asset("page.css"), _asset("draw.js") + _asset("page.js")
    title = ", ".join(run.name for run in runs)
    head = e(
        "head",
        e("meta", charset="utf-8"),
        e("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        e("meta", name="viewport", content="width=device-width, initial-scale=1"),
        e("meta", name="color-scheme", content="light dark"),
        e("meta", name="referrer", content="no-referrer"),
        e("title", f"{title} – training report"),
        e("style", style),
    )
    # Text in a script element is not escaped. Without "<" it cannot close the element.
    data = json.dumps(charts.page_data(runs)).replace("<", "\\u003c")
    body = e(
        "body",
        _header(runs, made, live),
        e("main", *_sections(runs)),
        e("script", data, type="application/json", id="data"),
        e("script", script),
        **({"data-live": live} if live else {}),
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
        drawn.append(controls.bar(runs))
    drawn.append(_marks(runs))
    drawn.append(e("div", *shown, times.goodput(runs), class_="grid"))
    rest = [facts.predicted(runs), profiles.section(runs), facts.samples(runs), facts.config(runs)]
    there = [section for section in rest if section is not None]
    compared = [listing.html_table(runs)] if len(runs) > 1 else []
    return [*compared, facts.cards(runs), drawn, *there, facts.environment(runs)]


def _marks(runs: Sequence[RunRead]) -> Element:
    """Return the legend of the runs' colors and the marks in the charts."""
    made = e("ul", class_="legend")
    if len(runs) > 1:
        for index, run in enumerate(runs):
            made.append(e("li", controls.toggle(index, run, facts.swatch(index))))
    for kind, meaning in LINES.items():
        if kind != "dots" or any("held_out_loss" in run.series for run in runs):
            made.append(e("li", line_sign(kind), meaning))
    there = {mark.kind for run in runs for mark in run.marks}
    for kind, meaning in KINDS.items():
        if kind in there:
            made.append(e("li", mark_sign(kind), meaning))
    return made
