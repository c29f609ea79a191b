"""Moments in bfloat16 and in host memory: what the update computes with them, on every mesh."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.certification import distances, traces
from jaxpar.config import replace
from jaxpar.config.validate import resolve
from jaxpar.model.parameters import param_specs
from jaxpar.optimizer import moments
from jaxpar.optimizer.rules import make_optimizer
from jaxpar.sharding.axes import FSDP_AXES, VOCAB_AXES
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import ParamSpec, abstract, count, partition_specs
from jaxpar.step.conversions import in_configured_dtypes
from jaxpar.step.state import (
    abstract_logical,
    abstract_state,
    bytes_per_device,
    init_state,
    state_shardings,
)
from jaxpar.step.train_step import make_train_step
from tests.optimizer.updates import weights_after
from tests.slow import slow
from tests.tiny import SMALL

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

BASE = replace(
    SMALL,
    **{
        "model.layers.feed_forward.bias": True,
        "model.init_std": 0.2,
        "optimizer.learning_rate": 3e-3,
        "optimizer.warmup_steps": 0,
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
    "unequal": {
        "parallel.pipeline": 2,
        "parallel.layers_per_stage": (3, 1),
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
def weights(devices):
    """Fields of the config -> weights after each of some updates, logical, by name.

    The updates of the train step, with random gradients that depend on the step alone.
    """

    @functools.cache
    def run(fields: frozenset) -> list[traces.Arrays]:
        return weights_after(*ready(devices, **dict(fields)), STEPS)

    return lambda **fields: run(frozenset(fields.items()))


def distance(found: list[traces.Arrays], wanted: list[traces.Arrays]) -> float:
    """Mean error of the last weights by their mean change since the first update; the worst."""
    return distances.worst(distances.update_errors(found[-1], wanted[-1], wanted[0]))[0]


# ------------------------------------------------------------------------------ what is kept


@pytest.mark.parametrize(
    ("name", "fields", "bytes_each"),
    [
        slow("adamw", {}, 12),
        ("adamw", FIRST, 10),
        slow("adamw", BOTH, 8),
        slow("lion", {}, 8),
        ("lion", FIRST, 6),
        slow("sgd", FIRST, 6),
    ],
)
def test_a_state_has_so_many_bytes_per_parameter(devices, name, fields, bytes_each):
    cfg, mesh = ready(devices, **{"optimizer.name": name}, **fields)
    state = init_state(cfg, mesh)
    counters = 4 * sum(leaf.ndim == 0 for leaf in jax.tree.leaves(state))
    assert bytes_per_device(state) == bytes_each * count(param_specs(cfg.model)) + counters
    kept = jax.tree.map(lambda a: (a.shape, a.dtype), state)
    assert kept == jax.tree.map(lambda a: (a.shape, a.dtype), abstract_state(cfg))


@pytest.mark.slow  # quicker: step/test_host_masters.py
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_offloaded_moments_lie_in_host_memory_before_and_after_a_step(devices, name):
    cfg, mesh = ready(devices, **{"optimizer.name": name}, **OFFLOAD, **MESHES["sharded"])
    state = init_state(cfg, mesh)
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    after, _ = make_train_step(cfg, mesh)(state, batch)
    wanted = state_shardings(cfg, mesh)
    for shardings in (jax.tree.map(lambda a: a.sharding, s) for s in (state, after)):
        assert shardings == wanted
    kinds = moments.map_moments(lambda _, __, a: a.memory_kind, wanted.params, wanted.opt_state)
    named = [leaf for leaf in jax.tree.leaves(kinds) if isinstance(leaf, str)]
    assert set(named) == {"pinned_host"}
    assert len(named) == (2 if name == "adamw" else 1) * len(jax.tree.leaves(state.params))
    rest = (wanted.step, wanted.params)
    assert {leaf.memory_kind for leaf in jax.tree.leaves(rest)} == {"device"}


# ------------------------------------------------------------------- what is computed with it

NAMES = pytest.mark.parametrize("name", ["adamw", slow("lion"), slow("sgd")])


def rounded_by(name: str) -> dict[str, str]:
    """Every moment of an optimizer in bfloat16."""
    return BOTH if name == "adamw" else FIRST


@NAMES
def test_the_first_update_does_not_see_the_rounding(weights, name):
    """It is computed in float32, from moments of zero; what it keeps is rounded afterwards."""
    exact, rounded = (weights(**{"optimizer.name": name}, **f) for f in ({}, rounded_by(name)))
    assert not distances.differing_arrays(rounded[0], exact[0])
    assert distances.differing_arrays(rounded[1], exact[1])


@NAMES
def test_the_next_ones_move_by_its_noise(weights, name):
    """bfloat16 has 8 bits, so a moment is off by some 0.2%, and on average not at all."""
    exact, rounded = (weights(**{"optimizer.name": name}, **f) for f in ({}, rounded_by(name)))
    # Lion moves by a sign: where noise can turn it, the whole step turns.
    assert 1e-5 < distance(rounded, exact) < (2e-2 if name == "lion" else 5e-3)


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        slow("sharded", BOTH),
        ("stages", BOTH),
        slow("sharded", BOTH | OFFLOAD),
        slow("stages", BOTH | OFFLOAD),
        slow("unequal", BOTH),
        slow("unequal", BOTH | OFFLOAD),
    ],
    ids=lambda value: (
        None if isinstance(value, str) else "host" if "optimizer.offload" in value else "device"
    ),
)
def test_every_mesh_rounds_alike(weights, mesh, fields):
    """Else the distance were that of two roundings: some 1e-3, as in the test above."""
    assert distance(weights(**fields, **MESHES[mesh]), weights(**BOTH)) < 1e-6


@pytest.mark.slow
def test_another_seed_rounds_otherwise(weights):
    other = weights(**BOTH, **{"train.seed": 1})
    start = lambda run: {n: run[-1][n] - run[0][n] for n in run[0]}  # noqa: E731
    errors = distances.gradient_errors(start(other), start(weights(**BOTH)))
    assert distances.worst(errors)[0] > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "name"),
    [*itertools.product(MESHES, ["adamw", "lion", "sgd"])],
)
def test_moments_in_host_memory_change_nothing(weights, name, mesh):
    """Up to the order in which the compiler multiplies and adds in another loop: an ulp."""
    fields = {"optimizer.name": name} | MESHES[mesh]
    assert distance(weights(**OFFLOAD, **fields), weights(**fields)) < 1e-6


@pytest.mark.slow
def test_offloaded_moments_decay_at_their_own_rate(weights):
    """The loop over slices counts a step once, and knows which weights decay."""
    other = {"optimizer.beta1": 0.5, "optimizer.weight_decay": 1.0, "optimizer.schedule": "linear"}
    found, wanted = weights(**OFFLOAD, **other), weights(**other)
    assert distance(found, wanted) < 1e-6 < 1e-2 < distance(found, weights())


@pytest.mark.slow
def test_odd_sizes_are_cut_into_whole_slices(weights):
    """Arrays outside the layers go through in equal slices, down to one where nothing divides."""
    odd = {"model.vocab_size": 67, "model.d_model": 31}
    assert distance(weights(**odd, **OFFLOAD), weights(**odd)) < 1e-6


@pytest.mark.slow
def test_conversion_keeps_shardings_and_rounds_to_the_nearest(devices):
    for fields in ({}, OFFLOAD):
        cfg, mesh = ready(devices, **fields, **MESHES["sharded"])
        state = init_state(cfg, mesh)
        third = lambda _, __, a: jax.device_put(np.full(a.shape, 1 / 3, a.dtype), a.sharding)  # noqa: E731
        thirds = moments.map_moments(third, state.params, state.opt_state)
        state = dataclasses.replace(state, opt_state=thirds)
        in_16_bits = replace(cfg, **BOTH)
        narrow = in_configured_dtypes(state, abstract_logical(in_16_bits, mesh), in_16_bits)
        assert jax.tree.map(lambda a: a.sharding, narrow) == state_shardings(cfg, mesh)
        back = in_configured_dtypes(narrow, abstract_logical(cfg, mesh), cfg)
        (value,) = {float(jnp.max(a)) for a in jax.tree.leaves(back.opt_state[0].mu)}
        assert value == float(jnp.bfloat16(1 / 3))
        assert narrow.opt_state[0].nu["embed"].dtype == jnp.bfloat16


def test_moments_follow_whatever_parameters_a_model_has():
    """Also one at the root of the tree that no built-in model has."""
    new = ParamSpec(shape=(64, 8), axes=("vocab", "embed"))
    layer = ParamSpec(shape=(2, 8, 16), axes=("layer", "embed", "mlp"), columns=1)
    specs = {"layers": {"w_up": layer}, "of_another_model": new}
    cfg = replace(BASE, **BOTH).optimizer
    empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract(specs))
    kept = moments.in_storage_dtype(make_optimizer(cfg, 4, specs).init(empty), cfg, specs)
    found, wanted = moments.specs_of_state(kept, specs)[0], partition_specs(specs)
    assert found.mu == found.nu == wanted and wanted["of_another_model"] == P(VOCAB_AXES, FSDP_AXES)
    assert all(a.dtype == jnp.bfloat16 for a in jax.tree.leaves((kept[0].mu, kept[0].nu)))
    names: list[str] = []
    moments.map_moments(lambda _, name, __: names.append(name), specs, kept)
    assert sorted(names) == sorted(2 * ["layers/w_up", "of_another_model"])
