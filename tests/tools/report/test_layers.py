"""Metrics of layers in a report: read in bounded memory, drawn and listed."""

import json

import numpy as np

from jaxpar.tools.report import layers
from jaxpar.tools.report.layers import MAX_CELLS, MAX_COLUMNS, MAX_MAPS, LayerMap
from jaxpar.tools.report.runs import read_run
from tests.tools.report.folders import add_values, write_layers, write_loads, write_run


def test_few_steps_are_kept_and_of_many_the_largest():
    few, many = LayerMap(2, 50), LayerMap(2, 12_000)
    for step in range(10, 51, 10):
        few.add(step, [step, None])
    steps, values = few.table()
    assert steps == [10, 20, 30, 40, 50]
    np.testing.assert_array_equal(values, [steps, [np.nan] * 5])
    for step in range(1, 12_001):
        many.add(step, [9.0 if step == 150 else 1.0, -step])
    steps, values = many.table()
    assert steps == list(range(100, 12_001, 100)) and len(steps) == MAX_COLUMNS
    np.testing.assert_array_equal(np.flatnonzero(values[0] == 9), [1])
    assert values[1, 0] == -1  # of steps 1 to 100
    deep = LayerMap(1000, 12_000)
    for step in range(1, 12_001, 10):
        deep.add(step, [1.0] * 1000)
    assert deep.table()[1].size <= MAX_CELLS


def test_what_is_no_value_of_a_layer_is_none(tmp_path):
    folder = write_run(tmp_path / "run", steps=20)
    write_layers(folder, (5, 10), lambda step, layer: 1.0 + layer, layers=2)
    odd = ([True, "x"], [1e99, -(2**63)], [[1], {}], [1.0], [], [1.0] * 2000, {"a": 1})
    more = {f"more_{i}": [1.0] for i in range(100)}
    for step, value in enumerate(odd, 11):
        add_values(folder, {step: {"layer_grad_norm": value} | more})
    run = read_run(str(folder))
    steps, values = run.layers["layer_grad_norm"].table()
    assert steps == [5, 10, 11, 12, 13] and len(run.layers) == MAX_MAPS
    np.testing.assert_array_equal(
        values, [[1, 1, np.nan, 1e99, np.nan], [2, 2, np.nan, -(2**63), np.nan]]
    )
    rows = [[cell.text for cell in row] for row in layers.figures([run])[0].iter("tr")]
    assert rows[1][2:5] == ["1", "–", "1"]
    assert layers.data(run)["layer_grad_norm"]["rows"][0] == [1, 1, None, 1e99, None]


def test_runs_have_a_map_each_and_loads_are_drawn_once(tmp_path):
    folders = [write_run(tmp_path / name, steps=20) for name in "ab"]
    for folder in folders:
        write_layers(folder, (5, 10), lambda step, layer: 2.0, name=layers.FULLEST)
        write_layers(folder, (5, 10), lambda step, layer: 2.0, name="own")
    write_loads(folders[0], (5, 10))
    runs = [read_run(str(folder)) for folder in folders]
    fullest, own = layers.figures(runs)
    assert [fullest.get("id"), own.get("id")] == ["layers-layer_fullest_expert", "layers-own"]
    assert [svg.get("data-run") for svg in fullest.iter("svg")] == ["1"]
    assert [svg.get("data-run") for svg in own.iter("svg")] == ["0", "1"]
    assert json.dumps(layers.data(runs[0]))


def test_epochs_of_sources_are_not_of_layers():
    maps: dict[str, LayerMap] = {}
    layers.read(maps, {"step": 1, "epochs": [0.1, 0.2], "layer_rms": [1.0]}, 10)
    assert [*maps] == ["layer_rms"]
