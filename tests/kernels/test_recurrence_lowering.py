"""The kernels of recurrences, lowered on a CPU for GPUs that are not present."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.kernels.platform import Platform, compiling_for
from jaxpar.kernels.recurrence import Shape, delta_rule, refusal, state_space
from jaxpar.prediction.hardware import GPUS
from jaxpar.tools.planning.compiling import target_config
from tests.kernels.test_triton_lowering import GPU, calls, lowered, needs_triton, on
from tests.kernels.triton_sources import TARGET
from tests.slow import slow_but

#: By name: B, T, G, H, K, V, C, and kernels with a gradient. Mamba-2's are those of Nemotron-H.
CASES = {
    "qwen3_next": (1, 8192, 16, 32, 128, 128, 64),
    "short_chunks": (2, 1000, 4, 4, 64, 192, 32),
    "change": (2, 4096, 4, 8, 128, 256, 64),
    "nemotron_h": (1, 8192, 8, 128, 128, 64, 64),
}


def both(name: str, backend: str = "triton"):
    """Forward and backward of a case, and their arguments: shapes."""
    B, T, G, H, K, V, C = CASES[name]
    delta = name != "nemotron_h"
    rule = delta_rule if delta else state_space
    x = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    wide = functools.partial(x, dtype="float32")
    arrays = [x(B, T, G, K), x(B, T, G, K), x(B, T, H, V), *[wide(B, T, H)] * (2 if delta else 1)]
    arguments = [arrays, x(B, T, dtype="bool"), wide(B, H, K, V), wide(B, T, H, V)]

    def run(arrays, begins, state, d_out):
        call = lambda *a: rule(*a[:-1], begins, a[-1], C, backend)  # noqa: E731
        found, pull = jax.vjp(call, *arrays, state)
        return found, pull((d_out, jnp.ones_like(found[1])))

    return run, arguments, Shape(C, K, V, "bfloat16")


@pytest.mark.parametrize("name", slow_but(["qwen3_next"], CASES))
def test_lowers(name):
    run, arguments, shape = both(name)
    gpu = Platform("gpu", GPU["9.0"], "9.0")
    assert refusal(shape, gpu) is None
    with compiling_for(gpu):
        assert calls(lowered(on("9.0"), run, *arguments)) == 6


def test_under_shard_map():
    """Results vary over the axes that q, k and v do: rows and heads; documents, over rows alone."""
    mesh = on("9.0", (2, 2), ("data", "tensor"))
    rows, heads = PartitionSpec("data"), PartitionSpec("data", None, "tensor")
    state = PartitionSpec("data", "tensor")
    run, (arrays, *rest), _ = both("short_chunks")

    def local(arrays, begins, state, d_out):
        (out, last), gradients = run(arrays, begins, state, d_out)
        assert jax.typeof(out).manual_axis_type == jax.typeof(arrays[0]).manual_axis_type
        return out, last, *gradients

    by_token = [heads] * len(arrays)
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(by_token, rows, state, heads),
        out_specs=(heads, state, *by_token, state),
        check_vma=True,
    )
    with compiling_for(Platform("gpu", GPU["9.0"], "9.0")):
        assert calls(lowered(mesh, mapped, arrays, *rest)) == 6


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_compiles(name):
    """Too much shared memory, or a shape that Triton refuses, is an error here."""
    gpu = GPUS["h100"]
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(gpu), topology="1x1x1"
    )
    mesh = Mesh(np.array(topology.devices), ("x",), axis_types=(AxisType.Auto,))
    here = NamedSharding(mesh, PartitionSpec())
    run, arguments, _ = both(name)
    placed = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), arguments
    )
    with jax.set_mesh(mesh), compiling_for(Platform("gpu", gpu.device_kind, "9.0")):
        assert jax.jit(run).lower(*placed).compile().as_text().count(f'"{TARGET}"') == 6


@pytest.mark.parametrize(("saved", "again"), [((), 3), (("out",), 2)])
def test_what_a_rematerialized_backward_runs_again(saved, again):
    """The kernels whose results it needs: not that of the outputs, if these are saved."""
    C = CASES["short_chunks"][-1]
    _, (arrays, begins, state, d_out), _ = both("short_chunks")
    policy = jax.checkpoint_policies.save_only_these_names(*saved)

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(arrays, state, begins):
        out = delta_rule(*arrays, begins, state, C, "triton")[0]
        return jnp.tanh(checkpoint_name(out, "out"))

    def gradients(arrays, begins, state, d_out):
        out, pull = jax.vjp(functools.partial(layer, begins=begins), arrays, state)
        return out, pull(d_out)

    with compiling_for(Platform("gpu", GPU["9.0"], "9.0")):
        text = lowered(on("9.0"), gradients, arrays, begins, state, d_out)
    assert calls(text) == 3 + again + 3
