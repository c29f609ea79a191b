"""What is compared on each mesh: a planted wrong value of each kind must fail."""

import dataclasses

import numpy as np
import pytest

from jaxpar.certification import comparison, distances, failures, small_config, traces, tracing
from jaxpar.certification.distances import further_results
from jaxpar.certification.meshes import (
    MOST_DEVICES,
    default_meshes,
    num_devices,
    own_mesh,
    simpler,
)
from jaxpar.certification.results import Result, Subject
from jaxpar.certification.traces import TrainingTrace
from jaxpar.config import ParallelConfig, replace
from jaxpar.config.config_file import load_config
from jaxpar.config.remat_policies import REMAT_POLICIES
from jaxpar.config.validate import resolve
from jaxpar.model.parameters import specs_of
from tests.tiny import STATE as STATE_OF_STAGES
from tests.tiny import TINY

WEIGHT = np.linspace(0.5, 1.5, 8, dtype=np.float32).reshape(2, 4)
AFTER = WEIGHT - 0.01
STATE = {
    "params/layers/wq": AFTER,
    "opt_state/0/mu/layers/wq": WEIGHT / 10,
    "ema/layers/wq": WEIGHT - 0.005,
    "own/layers/wq": WEIGHT,
}
METRICS = {
    "loss": np.float32(2.0),
    "grad_norm": np.float32(3.0),
    "num_tokens": np.int32(240),
    "expert_rows": np.full((2, 4), 16.0),
    "dropped_rows": np.float32(0),
}

RIGHT = TrainingTrace(
    init={"layers/wq": WEIGHT},
    loss=2.0,
    gradients={"layers/wq": WEIGHT},
    losses=[2.0, 1.9, 1.8],
    params={"layers/wq": AFTER},
    metrics=[METRICS, METRICS, METRICS],
    states={1: STATE, 3: STATE},
    evaluated=2.0,
    same={"scale": ({"loss": np.float32(1)}, {"loss": np.float32(1)})},
)


def results(found: TrainingTrace, tolerance: float = 1e-5) -> list[Result]:
    """All results of a trace."""
    compared = distances.compare(found, RIGHT, tolerance)
    return [
        *compared.results("meshes", "data=2", 3),
        *further_results("", "", found, RIGHT, tolerance),
    ]


def with_state(updates: int, path: str) -> TrainingTrace:
    """RIGHT with a wrong array in a state."""
    wrong = STATE | {path: STATE[path] * np.float32(1.01)}
    return dataclasses.replace(RIGHT, states=RIGHT.states | {updates: wrong})


def with_metric(step: int, name: str, value: float) -> TrainingTrace:
    """RIGHT with a wrong metric."""
    metrics = list(RIGHT.metrics)
    metrics[step] = METRICS | {name: np.asarray(value)}
    return dataclasses.replace(RIGHT, metrics=metrics)


def test_what_is_right_passes():
    found = results(RIGHT)
    assert all(result.passed for result in found)
    assert len({result.what for result in found}) == len(found) > 10


PLANTED = {
    "initial values": dataclasses.replace(RIGHT, init={"layers/wq": WEIGHT + np.float32(1e-7)}),
    "loss": dataclasses.replace(RIGHT, losses=[2.0, 1.9, 1.81]),
    "gradient": dataclasses.replace(RIGHT, gradients={"layers/wq": WEIGHT * 1.001}),
    "weights after 3 steps": dataclasses.replace(RIGHT, params={"layers/wq": AFTER + 1e-4}),
    "weights after 1 steps": with_state(1, "params/layers/wq"),
    "moments after 1 steps": with_state(1, "opt_state/0/mu/layers/wq"),
    "moments after 3 steps": with_state(3, "opt_state/0/mu/layers/wq"),
    "moving average after 1 steps": with_state(1, "ema/layers/wq"),
    "state of own after 3 steps": with_state(3, "own/layers/wq"),
    "evaluation": dataclasses.replace(RIGHT, evaluated=2.001),
    "scale": dataclasses.replace(
        RIGHT, same={"scale": ({"loss": np.float32(1 + 2e-7)}, {"loss": np.float32(1)})}
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_wrong_value_fails(what):
    (wrong,) = [result for result in results(PLANTED[what]) if not result.passed]
    assert wrong.what == what


@pytest.mark.parametrize(
    ("name", "value"),
    [("grad_norm", 3.001), ("num_tokens", 480), ("expert_rows", 16.0), ("dropped_rows", 1.0)],
)
@pytest.mark.parametrize("step", [0, 2])
def test_a_planted_wrong_metric_fails(name, value, step):
    """`expert_rows` has a wrong shape."""
    (wrong,) = [result for result in results(with_metric(step, name, value)) if not result.passed]
    assert wrong.what == ("metrics of later steps" if step else "metrics")
    assert wrong.where == (f"{name} of step {step + 1}" if step else name)


def test_an_array_that_is_missing_fails():
    less = {path: a for path, a in STATE.items() if not path.startswith("ema")}
    found = results(dataclasses.replace(RIGHT, states={1: less, 3: STATE}))
    (wrong,) = [result for result in found if not result.passed]
    assert wrong.what == "moving average after 1 steps"


NUMBER = "layers/layer_scale"


@pytest.mark.parametrize(
    ("zero", "row", "error"),
    [({NUMBER + distances.LAST}, 1, 0.0), ({NUMBER + distances.LAST}, 0, 1.0), ((), 1, 0.5)],
)
def test_the_last_row_is_left_out_if_its_gradient_is_0(zero, row, error):
    start, right = {NUMBER: np.ones((2, 1))}, {f"params/{NUMBER}": np.full((2, 1), 0.5)}
    found = {name: a + np.eye(2)[row, :, None] / 2 for name, a in right.items()}
    errors = distances.state_errors(found, right, start, 1, zero)
    assert errors["weights"][NUMBER] == pytest.approx(error, abs=1e-6)


def test_storing_in_float32_is_no_error_and_more_is():
    start, wanted = np.ones(4, np.float32), np.full(4, 1 + 1e-6)
    found = wanted.astype(np.float32)
    assert distances.change_error(found, wanted, start) > 1e-3
    assert distances.change_error(found, wanted, start, updates=1) == 0
    assert distances.change_error(start, wanted, start, updates=1) > 0.9


def test_loads_give_the_metrics_of_ranks():
    rows = np.array([[4, 0, 2, 2], [1, 1, 1, 5]])
    found = distances.rank_metrics(rows, 2)
    assert found == {"fullest_rank": 1.5, "fullest_rank_mean": 1.25}


def test_the_backward_is_searched_from_the_head_to_the_embedding():
    wanted = {
        "embed": np.ones((4, 2)),
        "final_norm": np.ones(2),
        "layers/wq": np.ones((2, 2)),
        "layers/wk": np.ones((2, 2)),
    }
    found = wanted | {"layers/wk": wanted["layers/wk"] * np.array([[1], [1.1]])}
    order = [(name, layer) for name, layer, _ in failures._backward(found, wanted, TINY.model)]
    assert order[0] == ("final_norm", None) and order[-1] == ("embed", None)
    assert order[1:3] == [("layers/wk", 1), ("layers/wq", 1)]


@pytest.mark.slow
def test_the_forward_is_searched_from_the_first_layer_on(quick_compile, devices):
    cfg = replace(TINY, **{"parallel.data": 2})
    subject = Subject(cfg, cfg, {}, {}, devices[:2], 0, 1e-5)
    init = traces.to_host(traces.initial_params(specs_of(cfg), cfg.train.seed))
    batch, trace = traces.random_batch(cfg), dataclasses.replace(RIGHT, init=init)
    found = failures._first_of_forward(resolve(cfg, 2), subject, batch, trace, 1e-5)
    assert found == "the head or the loss; the layers are right"
    init["layers/w_down"] = init["layers/w_down"] * np.array([1, 1.01]).reshape(2, 1, 1)
    found = failures._first_of_forward(resolve(cfg, 2), subject, batch, trace, 1e-5)
    assert found == "feed_forward_output of layer 1"


def test_options_are_dropped_one_at_a_time():
    found = list(simpler("data=4,tensor=2,zero=1,num_microbatches=2"))
    assert "data=4,tensor=2,num_microbatches=2" in found
    assert "data=4,tensor=2,zero=1" in found
    assert "data=2,tensor=2,zero=1,num_microbatches=2" in found
    assert "tensor=2,zero=1,num_microbatches=2" in found


def test_the_meshes_without_mesh_have_the_configs_own_and_fewer_devices_get_simpler_ones():
    own = ParallelConfig(pipeline=8, tensor=8, virtual_stages=3, num_microbatches=64)
    assert own_mesh(own) == ("pipeline=2,data=2,tensor=2,virtual_stages=2,num_microbatches=4")
    cfg = replace(TINY, **{"parallel": own})
    meshes, _ = default_meshes(cfg, MOST_DEVICES)
    assert next(iter(meshes)) == own_mesh(own)
    few, left_out = default_meshes(TINY, 2)
    assert few and all("needs" in why and "2" in why for why in left_out.values())


def test_chosen_layouts_have_every_pair_of_options():
    every = {
        frozenset({("a", i), ("b", j), ("c", (i + j) % 3)}): (i, j)
        for i in range(3)
        for j in range(3)
    }
    chosen, missing = tracing.covering(every, 60)
    assert missing == 0 and len(chosen) <= 9
    _, missing = tracing.covering(every, 2)
    assert missing == 27 - 6


def test_meshes_after_the_limit_are_listed(monkeypatch):
    monkeypatch.setattr(comparison, "Comparing", lambda of: None)
    monkeypatch.setattr(comparison, "MOST_SECONDS", -1.0)
    subject = Subject(TINY, TINY, {"data=2": TINY, "tensor=2": TINY}, {}, [], 0, 1e-5)
    found = [*comparison.compare_meshes(subject)]
    assert [one.mesh for one in found if "CPU seconds" in one.not_run] == ["data=2", "tensor=2"]


def test_layouts_of_a_dense_model_have_its_options():
    cfg = replace(TINY, **STATE_OF_STAGES)
    options = {pair for one in tracing._layouts(cfg, 4) for pair in tracing.options_of(one)}
    several = {(name, True) for name in tracing.COUNTS if name != "expert"}
    assert several | {("zero", 2), ("row_groups", 2)} <= options
    assert {("schedule", name) for name in ("1f1b", "gpipe", "zero_bubble")} <= options
    assert {("remat", remat) for remat in REMAT_POLICIES} <= options


@pytest.mark.parametrize(
    ("name", "mesh", "layers"),
    [
        ("llama3_8b", {"data": 4}, 2),
        ("llama3_8b", {"pipeline": 4}, 4),
        ("deepseek_v3", {"expert": 2}, 2),
        ("qwen3_next_80b_a3b", {"pipeline": 2, "expert": 2}, 4),
    ],
)
def test_layouts_are_traced_with_few_layers(name, mesh, layers):
    cfg = small_config.float32(load_config(name))
    meshes, _ = default_meshes(cfg, MOST_DEVICES)
    small = small_config.shrink(cfg, list(meshes.values()))
    one = dataclasses.replace(small, parallel=ParallelConfig(**{"data": 1} | mesh))
    few = tracing.with_fewest_layers(resolve(one, num_devices(one.parallel)))
    assert few.model.num_layers == layers
    assert {*few.model.layers} == {*small.model.layers}
