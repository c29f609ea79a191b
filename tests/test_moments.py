"""Moments in bfloat16 and in host memory: what the update computes with them, on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import moments, parity
from jaxpar.config import Config, replace
from jaxpar.parallel.mesh import make_mesh
from jaxpar.params import count
from jaxpar.state import abstract_state, bytes_per_device, init_state, state_shardings
from jaxpar.step import make_train_step
from jaxpar.validation import resolve

BASE = replace(
    parity.float32(Config()),
    **{
        "model.num_layers": 4,
        "model.d_model": 32,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.head_dim": 8,
        "model.d_ff": 64,
        "model.vocab_size": 64,
        "model.qkv_bias": True,
        "model.init_std": 0.2,
        "data.seq_len": 32,
        "train.global_batch_size": 8,
        "optimizer.learning_rate": 3e-3,
        "optimizer.warmup_steps": 0,
        "parallel.data": 1,
    },
)

FIRST = {"optimizer.first_moment_dtype": "bfloat16"}
BOTH = FIRST | {"optimizer.second_moment_dtype": "bfloat16"}
OFFLOAD = {"optimizer.offload": True}
MESHES = {
    "one device": {},
    "sharded": {"parallel.data": 2, "parallel.tensor": 2},
    "stages": {
        "parallel.pipeline": 2,
        "parallel.virtual_stages": 2,
        "parallel.num_microbatches": 2,
        "parallel.zero": 1,
    },
}
STEPS = 4


def ready(devices, **fields):
    """A resolved config and its mesh."""
    cfg = replace(BASE, **fields)
    p = cfg.parallel
    n = p.pipeline * p.data * p.tensor
    return resolve(cfg, n), make_mesh(p, devices[:n])


@pytest.fixture(scope="module")
def trace(devices):
    """Fields of the config -> what some steps on their mesh did."""

    @functools.cache
    def run(steps: int, fields: frozenset) -> parity.Trace:
        cfg, mesh = ready(devices, **dict(fields))
        batches = [parity.random_batch(cfg, i) for i in range(steps)]
        return parity.mesh_trace(cfg, mesh, batches, steps, parity.QUICK_COMPILE)

    return lambda steps=STEPS, **fields: run(steps, frozenset(fields.items()))


def distance(found: parity.Trace, wanted: parity.Trace) -> float:
    """Mean error of the weights after the steps by their mean change; of the worst parameter."""
    return parity.worst(parity.update_errors(found.params, wanted.params, wanted.init))[0]


# ------------------------------------------------------------------------------ what is kept


@pytest.mark.parametrize(
    ("name", "fields", "bytes_each"),
    [
        ("adamw", {}, 12),
        ("adamw", FIRST, 10),
        ("adamw", BOTH, 8),
        ("lion", {}, 8),
        ("lion", FIRST, 6),
        ("sgd", FIRST, 6),
    ],
)
def test_a_state_has_so_many_bytes_per_parameter(devices, name, fields, bytes_each):
    cfg, mesh = ready(devices, **{"optimizer.name": name}, **fields)
    state = init_state(cfg, mesh)
    counters = 4 * sum(leaf.ndim == 0 for leaf in jax.tree.leaves(state))
    assert bytes_per_device(state) == bytes_each * count_of(cfg) + counters
    kept = jax.tree.map(lambda a: (a.shape, a.dtype), state)
    assert kept == jax.tree.map(lambda a: (a.shape, a.dtype), abstract_state(cfg))


def count_of(cfg: Config) -> int:
    from jaxpar.model.transformer import param_specs

    return count(param_specs(cfg.model))


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_offloaded_moments_lie_in_host_memory_before_and_after_a_step(devices, name):
    cfg, mesh = ready(devices, **{"optimizer.name": name}, **OFFLOAD, **MESHES["sharded"])
    state = init_state(cfg, mesh)
    batch = parity.place_batch(parity.random_batch(cfg), cfg, mesh)
    after, _ = make_train_step(cfg, mesh)(state, batch)
    wanted = state_shardings(cfg, mesh)
    for shardings in (jax.tree.map(lambda a: a.sharding, s) for s in (state, after)):
        assert shardings == wanted
    kinds = moments.map_moments(lambda _, __, a: a.memory_kind, wanted.opt_state)
    named = [leaf for leaf in jax.tree.leaves(kinds) if isinstance(leaf, str)]
    assert set(named) == {"pinned_host"}
    assert len(named) == (2 if name == "adamw" else 1) * len(jax.tree.leaves(state.params))
    rest = (wanted.step, wanted.params)
    assert {leaf.memory_kind for leaf in jax.tree.leaves(rest)} == {"device"}


# ------------------------------------------------------------------- what is computed with it


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_the_first_update_does_not_see_the_rounding(trace, name):
    """It is computed in float32, from moments of zero; what it keeps is rounded afterwards."""
    kept = BOTH if name == "adamw" else FIRST
    exact, rounded = (trace(1, **{"optimizer.name": name}, **f) for f in ({}, kept))
    assert not parity.differing(rounded.params, exact.params)


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_the_next_ones_move_by_its_noise(trace, name):
    """bfloat16 has 8 bits, so a moment is off by some 0.2%, and on average not at all."""
    kept = BOTH if name == "adamw" else FIRST
    exact, rounded = (trace(**{"optimizer.name": name}, **f) for f in ({}, kept))
    # Lion takes the sign of a moment: where it is near 0, all of a step.
    assert 1e-5 < distance(rounded, exact) < (3e-2 if name == "lion" else 5e-3)


@pytest.mark.parametrize("mesh", ["sharded", "stages"])
@pytest.mark.parametrize("fields", [BOTH, BOTH | OFFLOAD], ids=["device", "host"])
def test_every_mesh_rounds_alike(trace, mesh, fields):
    """Else the distance were that of two roundings: some 1e-3, as in the test above."""
    found, wanted = trace(**fields, **MESHES[mesh]), trace(**BOTH)
    assert distance(found, wanted) < parity.update_tolerance(1e-5)
    assert parity.loss_error(found, wanted) < 1e-5


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
@pytest.mark.parametrize("mesh", MESHES)
def test_moments_in_host_memory_change_nothing(trace, name, mesh):
    """Up to the order in which the compiler multiplies and adds in another loop: an ulp."""
    fields = {"optimizer.name": name} | MESHES[mesh]
    found, wanted = trace(**OFFLOAD, **fields), trace(**fields)
    assert distance(found, wanted) < 1e-6
    assert parity.loss_error(found, wanted) < 1e-6


def test_clipping_and_decay_reach_offloaded_moments(trace):
    """Without clipping, and with more decay, the weights go elsewhere: both are in the loop."""
    plain = trace(**OFFLOAD)
    for field in ({"optimizer.clip_norm": 0.01}, {"optimizer.weight_decay": 1.0}):
        changed, wanted = trace(**OFFLOAD, **field), trace(**field)
        assert distance(changed, wanted) < 1e-6 < 1e-2 < distance(changed, plain)


def test_odd_sizes_are_cut_into_whole_slices(devices):
    """Arrays outside the layers go through in equal slices, down to one where nothing divides."""
    odd = {"model.vocab_size": 67, "model.d_model": 31}
    traces = []
    for fields in ({}, OFFLOAD):
        cfg, mesh = ready(devices, **odd, **fields)
        batches = [parity.random_batch(cfg, i) for i in range(2)]
        traces.append(parity.mesh_trace(cfg, mesh, batches, 2, parity.QUICK_COMPILE))
    assert distance(traces[1], traces[0]) < 1e-6


def test_conversion_keeps_shardings_and_rounds_to_the_nearest(devices):
    from jaxpar.state import in_configured_dtypes

    for fields in ({}, OFFLOAD):
        cfg, mesh = ready(devices, **fields, **MESHES["sharded"])
        state = init_state(cfg, mesh)
        third = lambda _, __, a: jax.device_put(np.full(a.shape, 1 / 3, a.dtype), a.sharding)  # noqa: E731
        state = state.replace(opt_state=moments.map_moments(third, state.opt_state))
        narrow = in_configured_dtypes(state, replace(cfg, **BOTH))
        assert jax.tree.map(lambda a: a.sharding, narrow) == state_shardings(cfg, mesh)
        back = in_configured_dtypes(narrow, cfg)
        (value,) = {float(jnp.max(a)) for a in jax.tree.leaves(back.opt_state[0].mu)}
        assert value == float(jnp.bfloat16(1 / 3))
        assert narrow.opt_state[0].nu["embed"].dtype == jnp.bfloat16
