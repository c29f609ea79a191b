"""Training in float8: the same on every mesh and under every policy, and close to float32.

Scales are powers of two, so a rank that scales by its own part of a tensor rounds as one that sees
all of it, but for the smallest numbers. A sum of 8-bit products is exact in float32 at these sizes,
in any order. Where something else is left between two meshes, it grows: a number that is moved
across the boundary between two 8-bit numbers changes by a whole spacing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpar.certification import distances, traces
from jaxpar.config import ConfigError, replace
from jaxpar.config.remat_policies import REMAT_POLICIES
from jaxpar.config.validate import resolve
from jaxpar.execution.decisions import execution_of
from jaxpar.inference.generation import config_for_sampling
from jaxpar.kernels import float8
from jaxpar.model import fused_weights, parameters
from jaxpar.parallel.collectives import varying
from jaxpar.parallel.fsdp import gather as fsdp
from jaxpar.sharding.axes import FSDP_AXES
from jaxpar.step.links import weights_of_step
from jaxpar.step.state import abstract_state, init_state
from jaxpar.step.train_step import (
    make_eval_step,
    make_gradient_step,
    make_train_step,
)
from tests.meshes.float8_traces import (
    ACROSS_MESHES,
    AGAINST_FLOAT32,
    BASE,
    assert_close,
    first_gradients,
    loss_curve,
    on_mesh,
    relative_errors,
)
from tests.slow import slow_but
from tests.tiny import remat_of


@functools.cache
def one_device(scaling: str, dtype: str = "float8") -> traces.TrainingTrace:
    fields = dict(compute__float8_scaling=scaling, compute__matmul_dtype=dtype)
    return first_gradients("data=1", jax.devices("cpu"), **fields)


# ----------------------------------------------------------------------------------- meshes

MESHES = """
data=2
data=2,gather_dtype=float8
data=4,gather_dtype=float8,layer_loop=unroll
data=2,zero=1
data=2,zero=1,layer_loop=unroll,num_microbatches=2
data=2,zero=2,layer_loop=unroll,num_microbatches=2
data=2,zero=2
tensor=2
sequence=2,gather_dtype=float8
sequence=2,context=ring
pipeline=2,num_microbatches=2
pipeline=2,num_microbatches=4,zero=1
pipeline=2,num_microbatches=2,pipeline_save=inputs,gather_dtype=float8,layer_loop=unroll
pipeline=2,data=2,sequence=2,tensor=2,num_microbatches=2,gather_dtype=float8
""".split()


#: Those that run with every change; the others are slow tests.
QUICK_MESHES = ["tensor=2"]


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("mesh", slow_but(QUICK_MESHES, MESHES))
def test_gradients_are_those_of_one_device(mesh, devices):
    found, wanted = first_gradients(mesh, devices), one_device("tensor")
    assert found.loss == pytest.approx(wanted.loss, rel=1e-4)
    error, name = distances.worst(relative_errors(found.gradients, wanted.gradients))
    assert error < ACROSS_MESHES, name


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MESHES[1], "tensor=2", MESHES[-1]])
def test_gradients_are_those_of_one_device_by_row(mesh, devices):
    found = first_gradients(mesh, devices, compute__float8_scaling="row")
    wanted, exact = one_device("row"), one_device("tensor", "compute")
    assert found.loss == pytest.approx(wanted.loss, rel=1e-4)
    errors = relative_errors(found.gradients, wanted.gradients)
    rounding = relative_errors(wanted.gradients, exact.gradients)
    assert all(error < rounding[name] / 2 for name, error in errors.items()), errors


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_gradients_of_interleaved_stages_are_those_of_one_device(devices):
    item, deep = "pipeline=2,num_microbatches=4,virtual_stages=2,zero=1", {"model__num_layers": 4}
    found, wanted = (first_gradients(mesh, devices, **deep) for mesh in (item, "data=1"))
    assert distances.worst(relative_errors(found.gradients, wanted.gradients))[0] < ACROSS_MESHES


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
@pytest.mark.parametrize("remat", [*REMAT_POLICIES, "attn_norm,mlp_hidden"])
def test_no_policy_changes_anything(remat, devices):
    found = first_gradients("data=1,layer_loop=unroll", devices, parallel__remat=remat_of(remat))
    errors = relative_errors(found.gradients, one_device("tensor").gradients)
    assert distances.worst(errors)[0] < ACROSS_MESHES


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_gradients_are_near_those_of_float32(scaling):
    found, wanted = one_device(scaling), one_device("tensor", "compute")
    assert found.loss == pytest.approx(wanted.loss, rel=2e-3)
    errors = relative_errors(found.gradients, wanted.gradients)
    assert all(1e-3 < error < AGAINST_FLOAT32 for error in errors.values()), errors


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_evaluation_multiplies_as_training_does(devices):
    cfg, mesh = on_mesh("data=2,gather_dtype=float8", devices)
    params = init_state(cfg, mesh).params
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    total, count = make_eval_step(cfg, mesh)(params, batch)
    measured, _ = make_gradient_step(cfg, mesh)(params, batch)
    assert float(total / count) == pytest.approx(float(measured["loss"]), rel=1e-6)


@pytest.fixture(scope="module")
def train_step(devices):
    """A config with gathers in 8 bits, its mesh, and its step, compiled once."""
    cfg, mesh = on_mesh("data=2,gather_dtype=float8", devices)
    return cfg, mesh, make_train_step(cfg, mesh)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    ("name", "bad"), [("wq", np.nan), ("w_down", np.inf), ("attn_norm", np.inf)]
)
def test_a_number_that_is_not_finite_reaches_the_loss(name, bad, train_step, devices):
    cfg, mesh, step = train_step
    state = init_state(cfg, mesh)
    weight = state.params["layers"][name]
    state.params["layers"][name] = weight.at[(1,) * weight.ndim].set(bad)
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    _, measured = step(state, batch)
    assert not np.isfinite(measured["loss"]) and not np.isfinite(measured["grad_norm"])


# ---------------------------------------------------------------------------------- gathers


@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gather_in_8_bits_is_a_rounded_gather(dim, dtype, devices):
    """Bit for bit, and so is the gradient of a shard."""
    cfg, mesh = on_mesh("data=2,sequence=2", devices)
    spec = PartitionSpec(*([FSDP_AXES, None] if dim == -2 else [None, FSDP_AXES]))
    w = jax.random.normal(jax.random.key(0), (64, 96))
    d_w = jax.random.normal(jax.random.key(1), (64, 96)).astype(dtype)

    def both(shard, d_w):
        shard, d_w = varying(shard), varying(d_w)
        scale = fsdp.float8_scales(float8.max_magnitude(shard.astype(dtype), (-2, -1)))

        def whole(shard):
            return float8.quantize_weight(
                fsdp.gather(shard, dim, dtype, "float32"), scale, "tensor", dim
            )

        def in_8_bits(shard):
            values, like = fsdp.gather_float8(shard, scale, dim, dtype, "float32")
            return float8.Float8Weight(values, scale, like, "tensor", dim)

        def rounded_before(shard):
            return in_8_bits(fsdp.quantize_shard(shard, scale, dtype))

        sent_as_it_is = rounded_before(shard).values
        results = [jax.lax.bitcast_convert_type(sent_as_it_is, jnp.uint8)[None]]
        for gather in (whole, in_8_bits):
            weight, vjp = jax.vjp(gather, shard)
            zeros = jax.tree.map(lambda a: a * 0, weight)
            bits = jax.lax.bitcast_convert_type(weight.values, jnp.uint8)
            results += [bits[None], vjp(zeros.replace(gradient=d_w))[0][None]]
        return results

    one = PartitionSpec(mesh.axis_names)
    found = jax.jit(
        jax.shard_map(both, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=one)
    )(w, d_w)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[1], found[3])
    np.testing.assert_array_equal(found[2], found[4])
    scale = float8.power_of_two_scale(float8.max_magnitude(w.astype(dtype)), float8.FORWARD)
    wanted = float8.quantize(w.astype(dtype), scale, float8.FORWARD)
    np.testing.assert_array_equal(found[0][0], jax.lax.bitcast_convert_type(wanted, jnp.uint8))


def lowered_step(cfg, mesh) -> str:
    """The step's StableHLO."""
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    return make_gradient_step(cfg, mesh).lower(abstract_state(cfg).params, batch).as_text()


def test_the_layers_weights_travel_in_8_bits(devices):
    """And their scales in one message for all the layers."""
    texts = {}
    for dtype in ("compute", "float8"):
        item = f"data=2,gather_dtype={dtype},layer_loop=unroll"
        cfg, mesh = on_mesh(item, devices)
        lines = lowered_step(cfg, mesh).splitlines()
        texts[dtype] = [line for line in lines if "all_gather" in line]
    eight = {dtype: sum("f8E4M3FN" in line for line in lines) for dtype, lines in texts.items()}
    # Four matrices, two layers, forward and backward; the table and the head stay in the other.
    assert eight == {"compute": 0, "float8": 16}
    assert len(texts["compute"]) == len(texts["float8"]) == 18


def test_scales_take_one_all_reduce_for_all_layers(devices):
    cfg, mesh = on_mesh("data=2,gather_dtype=float8,layer_loop=unroll", devices)

    def scales(params):
        shards = fused_weights.fuse(varying(params), execution_of(cfg))
        (chunk,) = weights_of_step(shards, cfg)["layers"]
        return jax.tree.map(lambda a: a[None], [w["scales"] for w in chunk])

    specs = jax.tree.map(lambda s: s.partition_spec, parameters.param_specs(cfg.model))
    step = jax.shard_map(
        scales, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(mesh.axis_names)
    )
    text = jax.jit(step).lower(abstract_state(cfg).params).as_text()
    assert text.count("stablehlo.all_reduce") == 1


# --------------------------------------------------------------------------------- training


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_the_loss_curve_is_that_of_float32(scaling, devices):
    """A text that can be learnt, 300 steps: each window of 20 steps within 0.5% on average."""
    plain = loss_curve(devices, compute__matmul_dtype="compute")
    found = loss_curve(devices, compute__float8_scaling=scaling)
    assert_close(found, plain)


# ------------------------------------------------------------------------------ configuration

D_FF, MIXER = "model.layers.feed_forward.d_ff", "model.layers.mixer"
HEADS = f"{MIXER}.num_heads"


@pytest.mark.parametrize(
    ("fields", "path", "fixes"),
    [
        (
            {"compute.matmul_dtype": "compute", "compute.float8_scaling": "row"},
            "compute.float8_scaling",
            2,
        ),
        (
            {"compute.matmul_dtype": "compute", "parallel.gather_dtype": "float8"},
            "parallel.gather_dtype",
            2,
        ),
        ({"parallel.gather_dtype": "float8", "parallel.zero": 1}, "parallel.gather_dtype", 2),
        ({"model.d_model": 72}, "model.d_model", 1),
        ({D_FF: 104}, D_FF, 2),
        ({D_FF: 96, "parallel.tensor": 4}, D_FF, 2),
        ({HEADS: 3, f"{MIXER}.num_kv_heads": 3}, HEADS, 1),
        ({"data.seq_len": 24}, "data.seq_len", 1),
        ({"data.seq_len": 48, "parallel.tensor": 2}, "data.seq_len", 1),
    ],
)
def test_what_cannot_work_is_refused_with_a_fix(fields, path, fixes):
    with pytest.raises(ConfigError) as raised:
        resolve(replace(BASE, **fields), 4)
    assert raised.value.field == path
    assert raised.value.fix.count("--") == fixes, raised.value.fix


def test_sides_need_not_be_multiples_of_16_without_float8():
    resolve(replace(BASE, **{"compute.matmul_dtype": "compute", D_FF: 104}), 1)


def test_text_is_sampled_in_the_compute_dtype():
    cfg = config_for_sampling(replace(BASE, **{"parallel.gather_dtype": "float8"}))
    assert (cfg.compute.matmul_dtype, cfg.parallel.gather_dtype) == ("compute", "compute")
    resolve(cfg, 1)


# ---------------------------------------------------------------------------------- memory

DEEP = replace(BASE, **{"model.num_layers": 128, "model.d_model": 32, HEADS: 4, D_FF: 64})

D, H, G, K, F = 32, 4, 4, 8, 64

#: Bytes per token and layer that remat `none` saves, everything else in float32.
SAVED = {
    "inputs of the projections, rounded": D + H * K + D + F,
    "queries and keys after RoPE, values": 4 * (H + 2 * G) * K,
    "attention's output and log-sum-exp": 4 * (H * K + H),
    "residual stream": 4 * D,
    "gate and up": 8 * F,
}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_inputs_of_matmuls_are_saved_in_8_bits(devices):
    def temporary_bytes(remat: str) -> int:
        cfg, mesh = on_mesh("data=1", devices, parallel__remat=remat_of(remat))
        cfg = resolve(replace(DEEP, parallel=cfg.parallel), 1)
        params = abstract_state(cfg).params
        batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
        lowered = make_gradient_step(cfg, mesh).lower(params, batch)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    tokens_and_layers = DEEP.train.global_batch_size * DEEP.data.seq_len * len(DEEP.model.layers)
    found = (temporary_bytes("none") - temporary_bytes("full")) / tokens_and_layers
    assert found == pytest.approx(sum(SAVED.values()), rel=0.02)
