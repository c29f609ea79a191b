"""Each collective: what it computes, and its transpose, against a statement in numpy.

`per_device` runs a function on one device's part each: arrays have a leading dim over the devices
of the axis. A statement gets all the parts, and says what each device must hold.
"""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.certification import traces
from jaxpar.config import ParallelConfig, replace
from jaxpar.config.validate import resolve
from jaxpar.parallel import collectives, gradients
from jaxpar.parallel.collectives import broadcast_from_last_stage, sum_over_stages
from jaxpar.parallel.fsdp import gather as fsdp
from jaxpar.parallel.tensor import permutes, shards
from jaxpar.sharding.axes import AXES, BATCH_SPEC, DATA, FSDP_AXES, PIPELINE, SEQUENCE, TENSOR
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh, shardings
from jaxpar.sharding.params import ParamSpec
from jaxpar.step.state import abstract_state, state_specs
from jaxpar.step.train_step import make_gradient_step, make_train_step
from tests.slow import slow
from tests.tiny import TINY

N = 4
"""Devices along the axis under test."""


def mesh_of(devices, axis: str, n: int = N):
    return make_mesh(ParallelConfig(**{"data": 1} | {axis: n}), devices[:n])


def per_device(fn, mesh, *arrays):
    """`fn` of each device's part of the arrays; the parts it returns, stacked."""
    spec = PartitionSpec(AXES)
    own = lambda *parts: jax.tree.map(lambda y: y[None], fn(*(p[0] for p in parts)))  # noqa: E731
    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=spec, out_specs=spec))(*arrays)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def check(fn, mesh, x, value, transpose):
    """fn(x) is `value(x)`, and its transpose of a random d is `transpose(d)`; on all parts."""
    y = per_device(fn, mesh, x)
    np.testing.assert_allclose(y, value(x), rtol=1e-6, atol=1e-6)
    d = normal(*y.shape, seed=1)
    dx = per_device(lambda x, d: jax.vjp(fn, x)[1](d)[0], mesh, x, d)
    np.testing.assert_allclose(dx, transpose(d), rtol=1e-6, atol=1e-6)


# The statements, on arrays with a leading dim of devices.


def gathered(dim):
    return lambda x: np.stack([np.concatenate(list(x), axis=dim)] * len(x))


def scattered(dim):
    return lambda x: np.stack(np.split(x.sum(0), len(x), axis=dim))


def traded(split_dim, concat_dim):
    """Device i gets the i-th piece of everybody, in the order of the devices."""

    def value(x):
        pieces = [np.split(part, len(x), axis=split_dim) for part in x]
        own = [[pieces[j][i] for j in range(len(x))] for i in range(len(x))]
        return np.stack([np.concatenate(parts, axis=concat_dim) for parts in own])

    return value


def summed(x):
    return np.stack([x.sum(0)] * len(x))


def from_last(x):
    return np.stack([x[-1]] * len(x))


def to_last(d):
    return np.concatenate([np.zeros_like(d[:-1]), d.sum(0)[None]])


def of(axis: str, fn, dim: int):
    """A collective of `permutes` over an axis, as a case."""
    return axis, lambda x: fn(x, axis, dim)


CASES = {
    "all_gather": (
        TENSOR,
        lambda x: collectives.all_gather(x, TENSOR, 1),
        gathered(1),
        scattered(1),
    ),
    "psum_scatter": (
        TENSOR,
        lambda x: collectives.psum_scatter(x, TENSOR, 1),
        scattered(1),
        gathered(1),
    ),
    "all_to_all": (
        SEQUENCE,
        lambda x: collectives.all_to_all(x, SEQUENCE, split_dim=2, concat_dim=1),
        traded(2, 1),
        traded(1, 2),
    ),
    "shift": (
        PIPELINE,
        lambda x: collectives.shift(x, PIPELINE, 1),
        lambda x: np.roll(x, 1, axis=0),
        lambda d: np.roll(d, -1, axis=0),
    ),
    "shift back": (
        PIPELINE,
        lambda x: collectives.shift(x, PIPELINE, -1),
        lambda x: np.roll(x, -1, axis=0),
        lambda d: np.roll(d, 1, axis=0),
    ),
    "ring all-gather": (*of(SEQUENCE, permutes.permute_all_gather, 2), gathered(2), scattered(2)),
    "ring reduce-scatter": (
        *of(SEQUENCE, permutes.permute_reduce_scatter, 2),
        scattered(2),
        gathered(2),
    ),
    "gather by all-to-all": (*of(TENSOR, permutes.all_to_all_gather, 1), gathered(1), scattered(1)),
    "reduce-scatter by all-to-all": (
        *of(TENSOR, permutes.all_to_all_reduce_scatter, 2),
        scattered(2),
        gathered(2),
    ),
    "gather_sequence": (TENSOR, shards.gather_sequence, gathered(1), scattered(1)),
    "scatter_sequence": (TENSOR, shards.scatter_sequence, scattered(1), gathered(1)),
    "broadcast_from_last_stage": (
        PIPELINE,
        broadcast_from_last_stage,
        from_last,
        to_last,
    ),
    "sum_over_stages": (PIPELINE, sum_over_stages, summed, summed),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_transpose(name, devices):
    axis, fn, value, transpose = CASES[name]
    check(fn, mesh_of(devices, axis), normal(N, 2, 8, 4), value, transpose)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_both_forms_of_a_gather_bring_the_same(dim, devices):
    mesh, x = mesh_of(devices, TENSOR), jnp.asarray(normal(N, 2, 4, 3), jnp.bfloat16)
    forms = permutes.permute_all_gather, permutes.all_to_all_gather
    found = [per_device(lambda x, g=gather: g(x, TENSOR, dim), mesh, x) for gather in forms]
    assert found[0].dtype == found[1].dtype == jnp.bfloat16
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    "scatter", [permutes.permute_reduce_scatter, permutes.all_to_all_reduce_scatter]
)
def test_a_scatter_adds_in_float32_and_rounds_once(scatter, devices):
    """256 + 1 + 1 + 1 is 256 in bfloat16; 259 is rounded to 260."""
    x = np.ones((N, 2, N, 3), np.float32)
    x[0] = 256
    mesh = mesh_of(devices, TENSOR)
    found = per_device(lambda x: scatter(x.astype(jnp.bfloat16), TENSOR, 1), mesh, x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, np.full((N, 2, 1, 3), 260))


def test_a_group_gathers_and_scatters_while_others_do_something_else(devices):
    """Each pair along TENSOR in a branch of its own: one gathers and scatters, one rests."""
    mesh = make_mesh(ParallelConfig(data=1, pipeline=4, tensor=2), devices[:8])
    x, size = normal(8, 2, 4, 3), 2

    def both(x):
        whole = permutes.all_to_all_gather(x, TENSOR, 1)
        return permutes.all_to_all_reduce_scatter(jnp.sin(whole), TENSOR, 1)

    def fn(x):
        stage = lax.axis_index(PIPELINE)
        return lax.switch(stage, [both, lambda x: x, lambda x: both(both(x)), lambda x: -x], x)

    once = lambda x: size * np.sin(x)  # noqa: E731
    pairs = np.split(x, 4)
    wanted = np.concatenate([once(pairs[0]), pairs[1], once(once(pairs[2])), -pairs[3]])
    np.testing.assert_allclose(per_device(fn, mesh, x), wanted, rtol=1e-5)
    slope = per_device(lambda x: jax.grad(lambda x: jnp.sum(fn(x)))(x), mesh, x)
    np.testing.assert_allclose(slope[:2], size * np.cos(pairs[0]), rtol=1e-5)
    np.testing.assert_array_equal(slope[6:], -np.ones_like(pairs[3]))


def test_several_axes_count_outermost_first(devices):
    mesh = make_mesh(ParallelConfig(data=2, expert=1, sequence=2), devices[:4])
    gather = lambda x: collectives.all_gather(x, FSDP_AXES, 0)  # noqa: E731
    check(gather, mesh, normal(4, 2, 3), gathered(0), scattered(0))


def test_a_tree_is_shifted_whole(devices):
    x = {"k": normal(N, 2), "v": normal(N, 3, seed=2)}
    moved = jax.tree.map(lambda a: np.roll(a, 1, axis=0), x)
    mesh = mesh_of(devices, SEQUENCE)
    found = per_device(
        lambda k, v: collectives.shift({"k": k, "v": v}, SEQUENCE, 1), mesh, *x.values()
    )
    chex.assert_trees_all_equal(found, moved)


def test_fsdp_gather(devices):
    """A weight's shards of dim -1; the whole local gradients are summed into shards."""
    gather = lambda w: fsdp.gather(w, -1, jnp.float32, "float32")  # noqa: E731
    check(gather, mesh_of(devices, DATA), normal(N, 3, 2), gathered(1), scattered(1))


def test_fsdp_sums_in_float32_what_bfloat16_would_lose(devices):
    """256 + 1 + 1 + 1 is 256 in bfloat16, whose numbers there are 2 apart."""
    d = np.ones((N, 2, N), np.float32)
    d[0] = 256
    mesh = mesh_of(devices, DATA)

    def scatter(reduce):
        return lambda d: fsdp.scatter(d.astype(jnp.bfloat16), -1, reduce)

    found = per_device(scatter("float32"), mesh, d)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.full((N, 2, 1), 259))
    rounded = np.asarray(per_device(scatter("bfloat16"), mesh, d))
    assert (rounded != 259).all() and (np.abs(rounded - 259) <= 4).all()


def test_fsdp_gather_casts_before_it_gathers(devices):
    w = normal(N, 2, 2)
    gather = lambda w: fsdp.gather(w, -2, jnp.bfloat16, "float32")  # noqa: E731
    mesh = mesh_of(devices, DATA)
    found = per_device(gather, mesh, w)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, gathered(0)(np.asarray(jnp.asarray(w, jnp.bfloat16))))


# ------------------------------------------------------------- the type of a value, and sums


def in_step(fn, mesh, in_specs, out_specs):
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def test_varying_changes_the_type_alone_and_its_transpose_is_a_sum(devices):
    mesh = mesh_of(devices, TENSOR)
    x, d = normal(3), normal(N, 3, seed=1)

    def fn(x, d):
        y, vjp = jax.vjp(collectives.varying, x)
        assert collectives.varying_axes(x) == ()
        assert collectives.varying_axes(y) == mesh.axis_names
        return lax.pmean(y, mesh.axis_names), vjp(collectives.varying(d[0]))[0]

    P = PartitionSpec
    y, dx = in_step(fn, mesh, (P(), P(TENSOR)), (P(), P()))(x, d)
    np.testing.assert_allclose(y, x, rtol=1e-6)
    np.testing.assert_allclose(dx, d.sum(0), rtol=1e-6)


SPECS = {
    "sharded": ParamSpec(shape=(4, 4), axes=("embed", "mlp")),
    "half": ParamSpec(shape=(4, 3), axes=("embed", "norm")),
    "replicated": ParamSpec(shape=(3,), axes=("norm",)),
}


def partials(devices):
    """Each device's local gradients of SPECS, stacked over (data, tensor): shards or whole."""
    mesh = make_mesh(ParallelConfig(data=2, tensor=2), devices[:4])
    shapes = {"sharded": (2, 2), "half": (2, 3), "replicated": (3,)}
    grads = {k: normal(2, 2, *shape, seed=i) for i, (k, shape) in enumerate(shapes.items())}
    return mesh, grads


def test_reduce_gradients_sums_over_the_axes_a_parameter_is_replicated_on(devices):
    mesh, grads = partials(devices)

    def fn(grads):
        local = jax.tree.map(lambda a: collectives.varying(a[0, 0]), grads)
        reduced = gradients.reduce_gradients(local, SPECS)
        return reduced, gradients.global_norm(reduced)

    out = {name: spec.partition_spec for name, spec in SPECS.items()}
    found, norm = in_step(fn, mesh, PartitionSpec(DATA, TENSOR), (out, PartitionSpec()))(grads)
    wanted = {
        "sharded": np.block([list(row) for row in grads["sharded"]]),
        "half": np.concatenate(list(grads["half"].sum(axis=1))),
        "replicated": grads["replicated"].sum(axis=(0, 1)),
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)
    squares = sum((value.astype(np.float64) ** 2).sum() for value in wanted.values())
    np.testing.assert_allclose(norm, np.sqrt(squares), rtol=1e-6)


def test_a_forgotten_reduction_is_an_error_when_traced(devices):
    mesh, grads = partials(devices)
    out = {name: spec.partition_spec for name, spec in SPECS.items()}
    forget = lambda g: jax.tree.map(lambda a: collectives.varying(a[0, 0]), g)  # noqa: E731
    with pytest.raises(ValueError, match="out_specs"):
        in_step(forget, mesh, PartitionSpec(DATA, TENSOR), out)(grads)


# ------------------------------------------------------------------ no axis, no collective

COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast)(?:-start)?\(.*"
)


def compiled_step(devices, **parallel) -> str:
    """Optimized HLO of the whole train step."""
    cfg = replace(
        TINY,
        **{
            "model.layers.mixer.num_heads": 8,
            "model.layers.mixer.num_kv_heads": 4,
            "model.layers.feed_forward.d_ff": 16,
            "model.vocab_size": 16,
            "data.seq_len": 16,
            "train.global_batch_size": 4,
        },
        **{f"parallel.{k}": v for k, v in ({"data": 1} | parallel).items()},
    )
    n = parallel.get("tensor", 1) * parallel.get("data", 1)
    cfg = resolve(cfg, n)
    mesh = make_mesh(cfg.parallel, devices[:n])
    abstract = lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)  # noqa: E731
    state = jax.tree.map(abstract, abstract_state(cfg), shardings(mesh, state_specs(cfg)))
    to = NamedSharding(mesh, BATCH_SPEC)
    shape = (cfg.train.global_batch_size, cfg.data.seq_len)
    ints = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=to)
    options = traces.QUICK_COMPILE
    lowered = make_train_step(cfg, mesh).lower(state, Batch(ints, ints, ints, ints))
    return lowered.compile(compiler_options=options).as_text()


@pytest.mark.parametrize("fields", [slow({}), {"zero": 1, "num_microbatches": 2}])
def test_a_mesh_of_ones_moves_nothing(fields, devices):
    """Only `psum` is left, which also changes a type, and each of its groups is one device."""
    found = list(COLLECTIVE.finditer(compiled_step(devices, **fields)))
    assert {match[1] for match in found} <= {"all-reduce"}
    assert all("replica_groups={{0}}" in match[0] for match in found)


def test_a_real_mesh_has_them(devices):
    found = list(COLLECTIVE.finditer(compiled_step(devices, data=2, tensor=2)))
    kinds = {match[1] for match in found}
    assert kinds >= {"all-gather", "all-reduce", "all-to-all", "collective-permute"}, kinds


def test_over_axes_of_size_1_the_argument_itself_comes_back(devices):
    def fn(x):
        for axes in (TENSOR, FSDP_AXES):
            assert collectives.all_gather(x, axes, 0) is x
            assert collectives.psum_scatter(x, axes, 0) is x
            assert collectives.all_to_all(x, axes, 0, 1) is x
        assert collectives.shift(x, PIPELINE, 1) is x
        assert broadcast_from_last_stage(x) is x
        assert sum_over_stages(x) is x
        return x

    per_device(fn, mesh_of(devices, DATA, 1), normal(1, 2, 2))


UNROLLED = {"parallel.data": 1, "parallel.layer_loop": "unroll"}


@pytest.mark.parametrize("context", ["allgather", slow("ulysses")])
def test_positions_and_documents_are_gathered_once_for_all_layers(context, devices):
    def gathers(layers: int) -> int:
        values = {"parallel.sequence": 2, "parallel.context": context, "model.num_layers": layers}
        cfg = resolve(replace(TINY, **values, **UNROLLED), 2)
        mesh = make_mesh(cfg.parallel, devices[:2])
        ints = jax.ShapeDtypeStruct((cfg.train.global_batch_size, cfg.data.seq_len), jnp.int32)
        batch = Batch(ints, ints, ints, ints)
        text = make_gradient_step(cfg, mesh).lower(abstract_state(cfg).params, batch).as_text()
        return len(re.findall(r"stablehlo\.all_gather.*xi32>\)? ->", text))

    assert gathers(2) == gathers(4) == 2


def test_a_gradient_that_nobody_adds_to_is_not_rounded(devices):
    grad = jnp.full((4, 8), 1 / 3, jnp.float32)
    alone = lambda g: fsdp.scatter(g, -1, "bfloat16")  # noqa: E731
    for n, exact in ((1, True), (2, False)):
        found = per_device(alone, mesh_of(devices, DATA, n), jnp.stack([grad] * n))
        assert np.array_equal(np.asarray(found)[0], n * np.asarray(grad)[:, : 8 // n]) == exact
