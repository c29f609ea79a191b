"""Plans with DiLoCo: the state of replicas, what they send, and their number."""

import jax
import pytest

from jaxpar.config import replace
from jaxpar.config.command_line import load_config
from jaxpar.config.validate import resolve
from jaxpar.prediction.communication import Cluster, traffic_of
from jaxpar.prediction.hardware import H200, NETWORKS
from jaxpar.prediction.shard import shard_of, state_bytes
from jaxpar.prediction.time import step_time
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.diloco.sent import fragment_bytes
from jaxpar.step.state import abstract_state, bytes_per_device, state_shardings
from jaxpar.tools.planning.fields import read_fixed
from tests.prediction.test_memory import SMALL

LARGE = replace(load_config("llama3_8b"), **{"parallel.replica": 2})
HOSTS = Cluster(H200, NETWORKS["eth100"], 16, 8)


def diloco(cfg, **fields):
    return replace(cfg, **{"diloco.every": 32} | fields)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_is_that_of_the_arrays(dtype, devices):
    mesh = {"parallel.replica": 2, "parallel.data": 2, "parallel.tensor": 2}
    plain = resolve(replace(SMALL, **mesh, **{"optimizer.first_moment_dtype": dtype}), 8)
    cfg = resolve(diloco(plain), 8)
    to = state_shardings(cfg, make_mesh(cfg.parallel, devices[:8]))
    placed = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract_state(cfg), to
    )
    assert sum(state_bytes(cfg)) == bytes_per_device(placed)
    weights = state_bytes(plain)[0]
    assert sum(state_bytes(cfg)) == sum(state_bytes(plain)) + 2 * weights  # outer ones, momentum


def test_an_overlap_keeps_what_it_exchanges(devices):
    """Fragments need more than half of the weights: each may have the embeddings or the head."""
    mesh = {"parallel.replica": 2, "parallel.data": 2, "model.num_layers": 2}
    fields = {"diloco.fragments": 2, "diloco.overlap": 2}
    at_once, cfg = (resolve(diloco(replace(SMALL, **mesh), **f), 4) for f in ({}, fields))
    to = state_shardings(cfg, make_mesh(cfg.parallel, devices[:4]))
    placed = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract_state(cfg), to
    )
    assert sum(state_bytes(cfg)) == bytes_per_device(placed)
    more, weights = sum(state_bytes(cfg)) - sum(state_bytes(at_once)), state_bytes(cfg)[0]
    assert weights < more < 2 * weights  # the gradient and its mean


def test_what_replicas_send():
    (plain, cfg) = (resolve(one, 16) for one in (LARGE, diloco(LARGE)))
    of_axes = lambda one: {t.axis: t for t in traffic_of(one, shard_of(one), HOSTS)}  # noqa: E731
    found, before = of_axes(cfg)["replica"], of_axes(plain)["replica"]
    assert found.sent == before.sent / 32 and found.exposed == 1.0
    assert found.sent * 32 == pytest.approx(sum(fragment_bytes(cfg)), rel=1e-3)
    overlapped = of_axes(resolve(diloco(LARGE, **{"diloco.overlap": 4}), 16))["replica"]
    assert (overlapped.sent, overlapped.exposed) == (found.sent, before.exposed)
    half = resolve(diloco(LARGE, **{"diloco.outer_dtype": "bfloat16"}), 16)
    assert of_axes(half)["replica"].sent == found.sent / 2
    slow, fast = (step_time(one, HOSTS) for one in (plain, cfg))
    # An inner step reads and writes what a step without DiLoCo does.
    overlap = resolve(diloco(LARGE, **{"diloco.fragments": 2, "diloco.overlap": 4}), 16)
    assert fast.optimizer == slow.optimizer == step_time(overlap, HOSTS).optimizer
    assert fast.exposed["replica"] < slow.exposed["replica"] / 5 and fast.total < slow.total


def test_the_number_of_replicas_is_kept():
    assert read_fixed("zero=1", diloco(LARGE)) == {"zero": 1, "replica": 2}
    assert read_fixed("replica=4", diloco(LARGE)) == {"replica": 4}
    assert read_fixed("zero=1", LARGE) == {"zero": 1}
