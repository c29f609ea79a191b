"""Loads of experts in a report: read in bounded memory, and drawn as heat maps."""

import json

import numpy as np
import pytest

from jaxpar.config import Attention, Experts, Glu, Layer, Model
from jaxpar.monitoring.routing import LOADS_FILE
from jaxpar.tools.report import experts
from jaxpar.tools.report.runs import MAX_COLUMNS, read_loads, read_run
from tests.tools.report.folders import write_lines, write_loads, write_run


def test_the_last_record_and_the_fullest_of_each_range(tmp_path):
    write_loads(tmp_path, range(10, 1001, 10), lambda step: [[1, 1 if step < 995 else 3], [2, 2]])
    found = read_loads(tmp_path)
    assert found.step == 1000
    np.testing.assert_allclose(found.last, [[0.5, 1.5], [1, 1]])
    fullest = found.over_time()
    assert fullest.shape == (2, MAX_COLUMNS)
    np.testing.assert_allclose(fullest[0], [1.0] * 119 + [1.5])
    np.testing.assert_allclose(fullest[1], 1.0)


def test_many_records_share_columns(tmp_path):
    write_loads(tmp_path, range(1, 1001), lambda step: [[1, 7 if step == 500 else 1]])
    fullest = read_loads(tmp_path).over_time()
    assert fullest.shape == (1, MAX_COLUMNS)
    assert fullest.max() == 1.75 and (fullest == 1.0).sum() == MAX_COLUMNS - 1


def test_of_repeated_steps_the_later_count(tmp_path):
    write_loads(tmp_path, (2, 4, 6), lambda step: [[0, 8]])
    write_lines(tmp_path / LOADS_FILE, [{"resumed_after_step": 2}])
    write_loads(tmp_path, (4, 6), lambda step: [[4, 4]])
    found = read_loads(tmp_path)
    np.testing.assert_allclose(found.last, [[1, 1]])
    np.testing.assert_allclose(found.over_time(), [[2, 2, 1, 1, 1, 1]])


def test_damaged_records_are_left_out(tmp_path):
    write_loads(tmp_path, (10, 20))
    good = read_loads(tmp_path)
    bad = ["x", [], [[]], [[1, 2], [3]], [[1, None]], [[-1, 2]], [1, 2], [[1e400, 1]], [[10**400]]]
    bad.append([[1e308, 1e308]])
    write_lines(tmp_path / LOADS_FILE, ({"step": 30, "loads": rows} for rows in bad))
    with open(tmp_path / LOADS_FILE, "a") as file:
        file.write('{"step":40,"loads":[[1,')
    found = read_loads(tmp_path)
    assert found.step == 20
    np.testing.assert_array_equal(found.last, good.last)
    np.testing.assert_array_equal(found.over_time()[:, -1], good.over_time()[:, -1])


def test_a_layer_without_tokens_is_drawn(tmp_path):
    write_loads(tmp_path, (10,), lambda step: [[0, 0]])
    np.testing.assert_array_equal(read_loads(tmp_path).last, [[0, 0]])


ATTENTION = Attention(num_heads=4, num_kv_heads=4, head_dim=8)
EXPERTS = Experts(expert=Glu(8), num_experts=2, experts_per_token=1)
DENSE, ROUTED = Layer("dense", ATTENTION, Glu(32)), Layer("routed", ATTENTION, EXPERTS)


def composed(*layers: Layer) -> dict:
    return {"model": Model(d_model=32, vocab_size=64, layers=layers)}


def test_figures_of_runs_with_experts(tmp_path):
    dense = write_run(tmp_path / "dense")
    sparse = write_run(tmp_path / "sparse", **composed(*[DENSE] * 3, *[ROUTED] * 2))
    assert experts.loads([read_run(str(dense))]) is None
    write_loads(sparse, range(20, 201, 20))
    runs = [read_run(str(dense)), read_run(str(sparse))]
    for figure in (experts.loads(runs), experts.over_time(runs)):
        assert len(list(figure.iter("svg"))) == 1
        cells = [cell.text for cell in figure.iter("td")]
        assert cells[0] == "3"  # the first layer with experts
    rows = [[cell.text for cell in row] for row in experts.loads(runs).iter("tr")]
    assert rows[1] == [str(sparse), "3", "1", "1.5", "0", "0.5", "0"]


def test_layers_with_others_between_them_are_numbered_among_themselves(tmp_path):
    run = write_run(tmp_path / "run", **composed(DENSE, ROUTED, DENSE, ROUTED))
    write_loads(run, range(20, 201, 20))
    assert next(experts.loads([read_run(str(run))]).iter("td")).text == "0"


@pytest.mark.parametrize(
    "layers",
    [
        3,
        None,
        {"distinct": [{"name": "x", "mixer": None}], "order": [2**62]},
        {"distinct": [{"name": "x", "feed_forward": {"class": "Experts"}}], "order": [0]},
        {"distinct": ["x"], "order": [0]},
        {"distinct": [{"name": "x", "experts": 3}], "order": [0]},
    ],
)
def test_damaged_layers_are_no_axis(tmp_path, layers):
    run = write_run(tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["model"]["layers"] = layers
    (run / "config.json").write_text(json.dumps(config))
    write_loads(run, range(20, 201, 20))
    for draw in (experts.loads, experts.over_time):
        assert next(draw([read_run(str(run))]).iter("td")).text == "0"
