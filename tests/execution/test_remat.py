"""What each remat policy keeps, read off the compiler's plan of buffers, and that it changes
nothing else."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxpar.certification import distances, traces
from jaxpar.config import ConfigError, QkNorm, RematSlice, RematValue, replace
from jaxpar.config.remat_policies import (
    LAYER_INPUT,
    ON_HOST,
    REMAT_NAMES,
    REMAT_POLICIES,
    names_on_host,
    of_layers,
    saved_names,
)
from jaxpar.config.validate import resolve
from jaxpar.execution.decisions import execution_of
from jaxpar.execution.remat import named
from jaxpar.prediction.memory import saved_per_token
from jaxpar.sharding.axes import BATCH_SPEC
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh, shardings
from jaxpar.step.state import abstract_state, init_state, state_specs
from jaxpar.step.train_step import make_gradient_step
from tests.parallel.test_pipeline_branches import equations
from tests.slow import slow, slow_but
from tests.tiny import SMALL, TINY, remat_of

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

#: Deep, so that what a layer keeps outweighs what one layer works with.
DEEP = replace(
    SMALL,
    **{
        "model.num_layers": 128,
        "model.layers.mixer.num_kv_heads": 4,
        "model.init_std": 0.2,
        "data.seq_len": 64,
        "train.global_batch_size": 2,
    },
)

M = DEEP.model
ATTENTION, GLU = M.layers[0].mixer, M.layers[0].feed_forward

#: float32 bytes per token and layer of each name that this model has: twice the table in
#: `jaxpar/execution/remat.py`.
BYTES = {
    "attn_norm": 4 * M.d_model,
    "qkv": 4 * (ATTENTION.num_heads + 2 * ATTENTION.num_kv_heads) * ATTENTION.head_dim,
    "qk": 4 * (ATTENTION.num_heads + ATTENTION.num_kv_heads) * ATTENTION.head_dim,
    "attn_out": 4 * ATTENTION.num_heads * ATTENTION.head_dim,
    "attn_lse": 4 * ATTENTION.num_heads,
    "attn_residual": 4 * M.d_model,
    "mlp_norm": 4 * M.d_model,
    "gate_up": 4 * 2 * GLU.d_ff,
    "mlp_hidden": 4 * GLU.d_ff,
}

TOKENS_AND_LAYERS = DEEP.train.global_batch_size * DEEP.data.seq_len * M.num_layers


@pytest.fixture(scope="module")
def mesh(devices):
    return make_mesh(DEEP.parallel, devices[:1])


@pytest.fixture(scope="module")
def temporary_bytes(mesh):
    """(remat, remat_group) -> temporary bytes of the compiled gradient step."""
    abstract = lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)  # noqa: E731

    @functools.cache
    def measure(remat: str, group: int = 1) -> int:
        cfg = resolve(
            replace(DEEP, **{"parallel.remat": remat_of(remat), "parallel.remat_group": group}), 1
        )
        to = shardings(mesh, state_specs(cfg).params)
        params = jax.tree.map(abstract, abstract_state(cfg).params, to)
        shape = (cfg.train.global_batch_size, cfg.data.seq_len)
        ints = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
        lowered = make_gradient_step(cfg, mesh).lower(params, Batch(ints, ints, ints, ints))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    return measure


@pytest.mark.slow
def test_policies_fall_in_memory(temporary_bytes):
    sizes = [temporary_bytes(policy) for policy in ("none", "dots", "attn_out", "full")]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4, sizes


@pytest.mark.parametrize("remat", slow_but(["none", "dots", "attn_lse"], ["none", "dots", *BYTES]))
def test_what_is_saved_costs_its_bytes(remat, temporary_bytes):
    """The slack: buffers are packed, so one as small as attn_lse can lie in another's gap."""
    extra = (temporary_bytes(remat) - temporary_bytes("full")) / TOKENS_AND_LAYERS
    names = saved_names(remat_of(remat))
    expected = sum(BYTES.get(name, 0) for name in names)
    if {"qkv", "qk"} <= set(names):
        expected -= BYTES["qk"]  # queries and keys before RoPE are then of no use
    assert 0 < extra == pytest.approx(expected, rel=0.05, abs=BYTES["attn_lse"])


@pytest.mark.slow
def test_a_policy_is_its_list_of_names(temporary_bytes):
    assert temporary_bytes("attn_lse,attn_out") == temporary_bytes("attn_out")


@pytest.mark.slow
def test_a_group_saves_the_input_of_its_first_layer(temporary_bytes):
    """Of 128 layers in groups of 16: 8 inputs, and what one group saves while it is computed."""
    plain, grouped = temporary_bytes("attn_out"), temporary_bytes("attn_out", 16)
    of_layer = BYTES["attn_out"] + BYTES["attn_lse"] + 4 * M.d_model  # and its input
    per_layer = TOKENS_AND_LAYERS / M.num_layers
    expected = per_layer * ((128 - 16) * of_layer - 8 * 4 * M.d_model)
    assert 0.8 * expected < plain - grouped < expected


@pytest.fixture(scope="module")
def gradients(mesh):
    """(remat, layer_loop, fields) -> loss and gradients of a small model that has all values."""
    base = replace(
        DEEP,
        **{
            "model.num_layers": 3,
            "model.layers.mixer.num_kv_heads": 2,
            "model.layers.mixer.qk_norm": QkNorm(),
        },
    )

    def compute(remat: str, loop: str, *others: tuple[str, object]):
        fields = {"parallel.remat": remat_of(remat), "parallel.layer_loop": loop}
        cfg = resolve(replace(base, **fields, **dict(others)), 1)
        batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
        measured, grads = make_gradient_step(cfg, mesh)(init_state(cfg, mesh).params, batch)
        return float(measured["loss"]), traces.to_host(grads)

    return functools.cache(compute)


@pytest.mark.parametrize(
    ("remat", "loop"),
    slow_but(
        [("qk,mlp_hidden", "scan")],
        itertools.product(["dots", "attn_out", "full", "qk,mlp_hidden"], ["scan", "unroll"]),
    ),
)
def test_gradients_do_not_depend_on_it(remat, loop, gradients):
    same_gradients(gradients, remat, loop)


@pytest.mark.slow
def test_gradients_do_not_depend_on_policies_of_layers(gradients):
    same_gradients(
        gradients,
        "none",
        "unroll",
        ("parallel.remat_layers", (RematSlice("full", step=2), RematSlice("dots", 1, 2))),
    )


@pytest.mark.slow
def test_gradients_do_not_depend_on_groups(gradients):
    same_gradients(gradients, "dots", "scan", ("parallel.remat_group", 3))


def same_gradients(gradients, *case):
    loss, grads = gradients(*case)
    wanted_loss, wanted = gradients("none", "scan")
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    errors = distances.gradient_errors(grads, wanted)
    assert distances.worst(errors)[0] < 5e-6, errors


#: Meshes and loops on which values go to host memory and back in some way of their own.
WAYS = {
    "scan": {"parallel.layer_loop": "scan"},
    "unroll": {"parallel.layer_loop": "unroll"},
    "sharded": {"parallel.layer_loop": "unroll", "parallel.data": 2, "parallel.tensor": 2},
    "accumulated": {"parallel.layer_loop": "unroll", "parallel.num_microbatches": 2},
    "stages": {
        "parallel.pipeline": 2,
        "parallel.num_microbatches": 2,
        "parallel.zero": 1,
        "parallel.layer_loop": "unroll",
    },
    "stages by GPipe": {
        "parallel.pipeline": 2,
        "parallel.num_microbatches": 2,
        "parallel.schedule": "gpipe",
        "parallel.zero": 1,
        "parallel.layer_loop": "unroll",
    },
    "stages again": {
        "parallel.pipeline": 2,
        "parallel.num_microbatches": 2,
        "parallel.virtual_stages": 2,
        "parallel.pipeline_save": "inputs",
    },
}

#: On the device, and the same values in host memory.
PAIRS = [("attn_out", "offload"), ("dots", "qkv:host,attn_out,attn_lse:host,attn_residual,gate_up")]

OFFLOADS = [
    *slow_but([(*PAIRS[1], "stages")], [(*PAIRS[1], way) for way in WAYS]),
    *(slow(*PAIRS[0], way) for way in WAYS),
]


@pytest.fixture(scope="module")
def traced(devices):
    """(remat, a key of WAYS) -> the gradient step of a small model, traced, and its arguments."""

    @functools.cache
    def trace(remat: str, way: str):
        layers = {"model.num_layers": 4, "model.layers.mixer.num_kv_heads": 2}
        fields = {"parallel.remat": remat_of(remat), "train.global_batch_size": 4}
        cfg = replace(DEEP, **layers, **fields, **WAYS[way])
        p = cfg.parallel
        n = p.pipeline * p.data * p.tensor
        cfg, mesh = resolve(cfg, n), make_mesh(p, devices[:n])
        params = init_state(cfg, mesh).params
        batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
        return make_gradient_step(cfg, mesh).trace(params, batch), (params, batch)

    return trace


@pytest.fixture(scope="module")
def program(traced):
    """(remat, a key of WAYS) -> the program for CUDA. A CPU's host memory is its own: programs for
    it have no copies."""
    lower = lambda remat, way: traced(remat, way)[0].lower(lowering_platforms=("cuda",))  # noqa: E731
    return functools.cache(lambda remat, way: lower(remat, way).as_text())


@pytest.fixture(scope="module")
def computed(traced):
    """(remat, a key of WAYS) -> loss and gradients here."""

    @functools.cache
    def run(remat: str, way: str):
        step, arguments = traced(remat, way)
        measured, grads = step.lower().compile()(*arguments)
        return float(measured["loss"]), traces.to_host(grads)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "offloaded", "way"), OFFLOADS)
def test_gradients_through_host_memory_are_the_same_bit_for_bit(
    kept, offloaded, way, program, computed
):
    text, (loss, grads) = program(offloaded, way), computed(offloaded, way)
    wanted_loss, wanted = computed(kept, way)
    assert loss == wanted_loss and not distances.differing_arrays(grads, wanted)
    assert copies(text, "pinned_host") and copies(text, "device")


def copies(text: str, where: str) -> int:
    """Copies to a memory in a lowered program."""
    return text.count(f'_xla_buffer_placement = "{where}"')


@pytest.mark.parametrize(
    ("remat", "way", "values"),
    [("offload", "unroll", 2 * 3), slow("offload", "scan", 2), slow("qk:host", "unroll", 2 * 3)],
)
def test_each_named_value_is_copied_once_each_way(remat, way, values, program):
    """Layers apart, but for the last one of four, whose backward is next; or one body for all. qk
    is queries and keys. A copy back that the backward began a layer ahead is there twice; the
    second finds the value on the device (`fetched`)."""
    text = program(remat, way)
    assert copies(text, "pinned_host") == values
    assert copies(text, "device") == values * (2 if way == "unroll" else 1)


def test_residuals_in_host_memory_wait_in_a_ring_in_host_memory(program):
    """Beside each layer's copies, one for each ring of zeros that they are put into: of two layers'
    two values, in three slots. On the device the ring has the same place, and no copy."""
    text = program("offload", "stages")
    rings = [line for line in text.splitlines() if 'placement = "pinned_host"' in line]
    slots = [line for line in rings if "tensor<3x" in line]
    assert len(slots) == 4, rings


@pytest.mark.parametrize(("remat", "way"), [("dots", "stages"), slow("attn_out", "unroll")])
def test_without_a_name_for_the_host_nothing_is_copied(remat, way, program):
    assert not copies(program(remat, way), "pinned_host")


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"pipeline": 2, "num_microbatches": 2}, {"False"}),
        ({"pipeline": 2, "num_microbatches": 2, "pipeline_save": "inputs"}, {"True"}),
        ({"data": 2, "num_microbatches": 2}, {"True"}),
    ],
    ids=["from the ring", "from a chunk's inputs", "in one iteration"],
)
def test_only_what_the_ring_brings_is_recomputed_without_a_barrier(fields, kept, devices):
    """Elsewhere the forward is in the same iteration, and XLA could take its values instead."""
    options = {f"parallel.{name}": value for name, value in fields.items()}
    options |= {"parallel.layer_loop": "unroll", "parallel.remat": "dots"}
    cfg = resolve(replace(TINY, **options), 2)
    mesh = make_mesh(cfg.parallel, devices[:2])
    abstract = lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)  # noqa: E731
    to = shardings(mesh, state_specs(cfg).params)
    params = jax.tree.map(abstract, abstract_state(cfg).params, to)
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    traced = make_gradient_step(cfg, mesh).trace(params, batch)
    assert set(re.findall(r"prevent_cse=(\w+)", str(traced.jaxpr))) == kept


def test_names_say_where():
    assert saved_names((RematValue("attn_lse"), RematValue("qk"))) == ("attn_lse", "qk")
    assert names_on_host("offload") == ("layer_input", "attn_out")
    assert names_on_host((RematValue("gate_up"), RematValue("qk", "host"))) == ("qk",)
    assert names_on_host("dots") == ()


def test_unknown_names_are_refused():
    for remat in ("everything", "qkv,atn_out", "attn_out,"):
        with pytest.raises(ConfigError, match=r"parallel\.remat.*must be one of none, dots"):
            resolve(replace(DEEP, **{"parallel.remat": remat}), 1)
    with pytest.raises(ConfigError, match="must be a policy, or name values to save"):
        resolve(replace(DEEP, **{"parallel.remat": ()}), 1)
    with pytest.raises(AssertionError, match="atn_out"):
        named(jnp.zeros(1), "atn_out")


def test_every_policy_saves_known_names():
    assert {*BYTES, "latents", "latent_norms"} == set(REMAT_NAMES)
    for names in REMAT_POLICIES.values():
        assert {name.removesuffix(ON_HOST) for name in names} <= {*REMAT_NAMES, LAYER_INPUT}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ((), "nnnnnn"),
        ((RematSlice("full", step=2),), "fnfnfn"),
        ((RematSlice("full", stop=2),), "ffnnnn"),
        ((RematSlice("full", start=-2),), "nnnnff"),
        ((RematSlice("full", 3, 4), RematSlice("dots", -1)), "nnnfnd"),
        ((RematSlice("full"), RematSlice("dots", 1, 3)), "fddfff"),
        ((RematSlice("full", 1, 5, 3),), "nfnnfn"),
    ],
)
def test_policies_of_layers(entries, expected):
    parallel = dataclasses.replace(DEEP.parallel, remat="none", remat_layers=entries)
    assert "".join(policy[0] for policy in of_layers(parallel, 6)) == expected


HALF = RematSlice("full", step=2)


def test_the_planner_takes_the_mean_of_all_layers():
    mixed = {
        "parallel.layer_loop": "unroll",
        "parallel.remat_layers": (HALF,),
    }
    none = {"parallel.layer_loop": "unroll", "parallel.remat": "none"}
    full = none | {"parallel.remat": "full"}
    cfg = lambda fields: resolve(replace(DEEP, **fields), 1)  # noqa: E731
    half = cfg(none | mixed)
    assert saved_per_token(half) == (saved_per_token(cfg(none)) + saved_per_token(cfg(full))) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [slow({"num_microbatches": 2}), {"pipeline": 2, "num_microbatches": 2}]
)
def test_layers_differentiated_one_by_one_keep_their_policies(parallel, devices):
    """Half of the layers recompute their matmuls: half of what is added if all of them do."""
    fields = {"layer_loop": "unroll", "zero": 1, "remat": "none", "data": 1} | parallel
    n = fields.get("pipeline", 1)

    def products(*entries: RematSlice) -> int:
        values = {f"parallel.{name}": v for name, v in (fields | {"remat_layers": entries}).items()}
        cfg = resolve(replace(TINY, **values, **{"model.num_layers": 4}), n)
        assert execution_of(cfg).layers_per_vjp == 1
        mesh, batch = make_mesh(cfg.parallel, devices[:n]), traces.random_batch(cfg)
        step = jax.make_jaxpr(make_gradient_step(cfg, mesh))(abstract_state(cfg).params, batch)
        return sum(e.primitive.name == "dot_general" for e in equations(step.jaxpr))

    none, half, full = (
        products(),
        products(RematSlice("full", step=2)),
        products(RematSlice("full")),
    )
    assert none < full and 2 * half == none + full
