"""Draws the loads of experts: by layer and expert at the last step, and by layer over time."""

from collections.abc import Callable, Sequence
from xml.etree.ElementTree import Element

from jaxpar.config import ConfigError, Experts
from jaxpar.config.layers import from_values
from jaxpar.tools.report.drawing import BOUNDS, HeatMap, Scale, heat_map, short
from jaxpar.tools.report.elements import e, table
from jaxpar.tools.report.runs import Loads, RunRead

#: Most layers of which a description tells.
MAX_TOLD = 12

type Draw = Callable[[RunRead, Loads], Element]


def loads(runs: Sequence[RunRead]) -> Element | None:
    """Return a heat map of each run's experts at its last step."""
    rows = []
    for run, found in _with_experts(runs):
        for layer, values in enumerate(found.last, _first_layer(run)):
            most, least = int(values.argmax()), int(values.argmin())
            idle = int((values < BOUNDS[0]).sum())
            numbers = [most, short(values[most]), least, short(values[least]), idle]
            rows.append([run.name, layer, *numbers])
    names = ["run", "layer", "fullest", "load", "emptiest", "load", "below 1/8"]
    return _figure("expert-loads", "Expert loads", runs, _at_last_step, table(names, rows))


def over_time(runs: Sequence[RunRead]) -> Element | None:
    """Return a heat map of the fullest expert of each layer over the steps of each run."""
    rows = []
    for run, found in _with_experts(runs):
        for layer, values in enumerate(found.over_time(), _first_layer(run)):
            numbers = [values[0], values[-1], values.min(), values.max()]
            rows.append([run.name, layer, *map(short, numbers)])
    names = ["run", "layer", "first", "last", "min", "max"]
    title = "Fullest expert of each layer"
    return _figure("fullest-experts", title, runs, _over_time, table(names, rows))


def _figure(
    name: str, title: str, runs: Sequence[RunRead], draw: Draw, values: Element
) -> Element | None:
    """Return a figure with a drawing of each run that has experts; None if there are none."""
    shown = _with_experts(runs)
    if not shown:
        return None
    head = e("h3", title, e("span", " relative to the layer's mean; a row is a layer"))
    figure = e("figure", head, id=name)
    for run, found in shown:
        if len(runs) > 1:
            figure.append(e("p", run.name, class_="note"))
        figure.append(draw(run, found))
    figure.append(e("details", e("summary", "Values"), values))
    return figure


def _at_last_step(run: RunRead, found: Loads) -> Element:
    layers, experts = found.last.shape
    first = _first_layer(run)
    texts = [
        f"layer {layer}: expert {values.argmax()} has {short(values.max())} times the mean, "
        f"expert {values.argmin()} {short(values.min())} times"
        for layer, values in enumerate(found.last, first)
    ]
    about = f"{run.name}: {layers} layers of {experts} experts at step {found.step}"
    x = Scale(-0.5, experts - 0.5)
    label = f"experts, step {found.step:,}"
    return heat_map(HeatMap("Expert loads", about, found.last.tolist(), texts, first, x, label))


def _over_time(run: RunRead, found: Loads) -> Element:
    first, values = _first_layer(run), found.over_time()
    texts = [
        f"layer {layer}: {short(loads.min())} to {short(loads.max())} times the mean"
        for layer, loads in enumerate(values, first)
    ]
    about = f"{run.name}: {'; '.join(texts[:MAX_TOLD])}"
    x = Scale(0.0, float(found.step))
    title = "Fullest expert of each layer"
    return heat_map(HeatMap(title, about, values.tolist(), texts, first, x, "steps"))


def _with_experts(runs: Sequence[RunRead]) -> list[tuple[RunRead, Loads]]:
    return [(run, run.loads) for run in runs if run.loads is not None]


def _first_layer(run: RunRead) -> int:
    """Return the number of the first layer with experts; 0 if the run's config gives none.

    If there are others between those with experts, layers are numbered among these, from 0.
    """
    try:
        layers = from_values(run.config.get("model", {}).get("layers", ()))
    except (ConfigError, TypeError):  # TypeError: a component without its required fields
        return 0
    places = [i for i, layer in enumerate(layers) if isinstance(layer.feed_forward, Experts)]
    return places[0] if places and places[-1] - places[0] < len(places) else 0
