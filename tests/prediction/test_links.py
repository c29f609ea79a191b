"""What a compressed sum over replicas costs and gains, as planned: memory, bytes, time."""

import json
import math
from pathlib import Path

import jax
import pytest

from jaxpar.config import ConfigError, replace
from jaxpar.config.command_line import load_config
from jaxpar.config.validate import resolve
from jaxpar.prediction.communication import Cluster, in_words_of_sums, traffic_of
from jaxpar.prediction.hardware import H200, NETWORKS, network_named
from jaxpar.prediction.shard import moment_bytes, shard_of, state_bytes
from jaxpar.prediction.time import step_time
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import abstract_logical, bytes_per_device
from tests.tiny import SMALL

TWO_HOSTS = Cluster(H200, NETWORKS["eth100"], 16, 8)
CARDS = Path(__file__).parents[2] / "docs" / "benchmarks"
LLAMA = replace(load_config("llama3_8b"), **{"parallel.replica": 2, "train.global_batch_size": 64})


def of_method(method: str, cfg=LLAMA, n: int = 16):
    return resolve(replace(cfg, **{"parallel.replica_reduction": method}), n)


@pytest.mark.parametrize("method", ["int8", "top_k"])
def test_memory_of_errors_is_that_of_the_state(method, devices):
    fields = {"parallel.replica": 2, "parallel.tensor": 2}
    cfg = of_method(method, replace(SMALL, **fields), 4)
    state = abstract_logical(cfg, make_mesh(cfg.parallel, devices[:4]))
    kept = sum(map(math.prod, [a.sharding.shard_shape(a.shape) for a in _leaves(state)])) * 4
    exact = of_method("float32", cfg, 4)
    assert state_bytes(cfg)[1] == state_bytes(exact)[1] + kept
    assert sum(state_bytes(cfg)) == bytes_per_device(state)
    assert moment_bytes(cfg) == moment_bytes(exact)


def _leaves(state):
    return jax.tree.leaves(state.extra["feedback"])


def test_traffic_and_time_of_a_layout_follow_its_method():
    exact, largest = of_method("float32"), of_method("top_k")
    sent = {c.parallel.replica_reduction: _replica_traffic(c).sent for c in (exact, largest)}
    assert sent["top_k"] < sent["float32"] / 50
    assert step_time(largest, TWO_HOSTS).total < step_time(exact, TWO_HOSTS).total
    text = in_words_of_sums(of_method("int8"))
    assert text.startswith("2, which sum gradients in int8: ")
    assert text.endswith("3.94 times fewer than in float32")


def _replica_traffic(cfg):
    found = traffic_of(cfg, shard_of(cfg), TWO_HOSTS)
    return next(one for one in found if one.axis == "replica")


#: `scripts/measure/slow_link.py --times`: its model, and its methods besides replica_reduction.
TIMED = {
    "parallel.replica": 2,
    "parallel.zero": 1,
    "parallel.layer_loop": "scan",
    "parallel.remat": "dots",
    "model.num_layers": 8,
    "data.seq_len": 4096,
    "data.document_mask": False,
    "train.global_batch_size": 4,
}
DILOCO = {
    "diloco": {"diloco.every": 50},
    "diloco_overlap": {"diloco.every": 50, "diloco.fragments": 2, "diloco.overlap": 5},
}


def test_steps_are_those_measured_on_two_gpus():
    card = json.loads((CARDS / "slow_link-h200x2-kernel.json").read_text())
    measured = {
        name: row["mean_ms"]
        for name, row in card["rows"].items()
        if name in ("float32", "bfloat16", "int8", "top_k", *DILOCO)
    }
    base = replace(load_config("llama_1b"), **TIMED)
    planned = {}
    for name in measured:
        fields = DILOCO.get(name, {"parallel.replica_reduction": name})
        cfg = resolve(replace(base, **fields), 2)
        planned[name] = 1e3 * step_time(cfg, Cluster(H200, NETWORKS["eth100"], 2, 8)).total
    assert planned == pytest.approx(measured, rel=0.045)
    assert set(DILOCO) < set(planned) and len(planned) == 5


def test_a_network_may_be_a_speed():
    assert network_named("10gbit").bandwidth.value == 0.8 * 10e9 / 8
    for name in ("0gbit", "gbit", "-1gbit", "1e3gbit"):
        with pytest.raises(ConfigError, match="is not a known network"):
            network_named(name)
