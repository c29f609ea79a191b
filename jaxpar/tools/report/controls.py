"""The controls above the charts: axes, smoothing, unit, runs. `page.js` acts on them."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from jaxpar.tools.charts.elements import e
from jaxpar.tools.report.charts import bits_per_nat, hours_of
from jaxpar.tools.report.runs import RunRead

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
