"""Loads of experts in a step: the update of the router's bias, and the metrics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpar.config import replace
from jaxpar.model.probes import Probed
from jaxpar.parallel.collectives import varying
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.features.experts import ExpertLoads, balance_bias, load_metrics, reduce_tallies
from tests.tiny import EXPERTS, TINY

CFG = replace(
    TINY,
    **{
        "model.layers.feed_forward": EXPERTS,
        "model.layers.feed_forward.router.balancing_bias": True,
        "train.router_bias_rate": 0.5,
        "train.balance_loss": 0.1,
        "parallel.data": 2,
        "parallel.tensor": 2,
        "parallel.pipeline": 2,
    },
)


@pytest.mark.parametrize(("ok", "change"), [(True, [[-0.5, 0.5, 0, 0]]), (False, [[0, 0, 0, 0]])])
def test_bias_moves_against_the_load(ok, change):
    loads = ExpertLoads(jnp.array([[6.0, 2.0, 4.0, 4.0]]), jnp.zeros((1, 2)), jnp.zeros(1))
    bias = jnp.array([[0.25, 0.0, -1.0, 2.0]])
    params = {"layers": {"router_bias": bias, "w": 1}, "embed": 2}
    found = balance_bias(params, loads, jnp.bool_(ok), CFG)
    np.testing.assert_allclose(found["layers"].pop("router_bias"), bias + np.array(change))
    assert found == {"layers": {"w": 1}, "embed": 2}


def test_without_loads_nothing_moves():
    params = {"layers": {"router_bias": jnp.ones((1, 4))}}
    assert balance_bias(params, None, jnp.bool_(True), CFG) is params
    dense = replace(CFG, **{"model.layers.feed_forward.router.balancing_bias": False})
    loads = ExpertLoads(jnp.ones((1, 4)), jnp.zeros((1, 2)), jnp.zeros(1))
    assert balance_bias({}, loads, jnp.bool_(True), dense) == {}


def metrics(tallies: np.ndarray, tokens: int, devices) -> dict[str, float]:
    """The metrics on eight devices. tallies: [8, layers of a stage, E + 3], by device."""
    mesh = make_mesh(CFG.parallel, devices[:8])

    def local(tally):
        loads = reduce_tallies(Probed(varying(tally[0]), ()), tokens, CFG)
        return load_metrics(loads, tokens, CFG)

    split = PartitionSpec(("pipeline", "data", "tensor"))
    step = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=PartitionSpec())
    found = jax.jit(functools.partial(step))(tallies)
    return {name: float(value) for name, value in found.items()}


def test_metrics_of_all_layers_and_devices(devices):
    """Layer 0 is balanced; in layer 1, two experts have everything. One tensor rank counts."""
    tallies = np.zeros((8, 1, 7), np.float32)
    tallies[0, 0] = [3, 1, 2, 2, 4.0, 1, 0]  # stage 0: data 0, tensor 0
    tallies[2, 0] = [1, 3, 2, 2, 4.0, 3, 0]  # stage 0: data 1
    tallies[4, 0] = [4, 4, 0, 0, 8.0, 0, 0]
    tallies[6, 0] = [4, 4, 0, 0, 8.0, 0, 0]
    found = metrics(tallies, 8, devices)
    assert found.pop("expert_entropy") == pytest.approx((1 + 0.5) / 2)
    assert found.pop("fullest_expert") == pytest.approx(2.0)
    assert found.pop("dropped_rows") == 0
    assert found.pop("balance_loss") == pytest.approx((1 + 2) / 2)
    assert not found, "the z-loss has no weight"
    tallies[6, 0, 0] = 3
    assert metrics(tallies, 8, devices)["dropped_rows"] == 1
