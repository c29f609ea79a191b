"""The Triton attention kernels, lowered on a CPU for GPUs that are not present.

Lowering writes their source, and checks shapes and the types of results under `shard_map`. Where
`jax_triton` and JAX's CUDA plugin are installed, Triton compiles the source, too, and the slow
tests compile the program to machine code.
"""

import contextlib
import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.kernels.attention import attention
from jaxpar.kernels.attention.triton import api as triton
from jaxpar.kernels.attention.triton.blocks import default_backward, default_forward
from jaxpar.kernels.platform import Platform, compiling_for
from jaxpar.prediction.hardware import GPUS
from jaxpar.tools.planning.compiling import has_plugin, target_config
from tests.kernels.test_hopper_lowering import MASKS, NAMES, shapes_of
from tests.kernels.triton_sources import TARGET, sources
from tests.slow import slow_but

GPU = {
    "8.0": "NVIDIA A100-SXM4-80GB",
    "8.9": "NVIDIA L4",
    "9.0": "NVIDIA H200",
    "10.0": "NVIDIA B200",
    "12.0": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}

#: Whether Triton can compile kernels here.
HAS_TRITON = importlib.util.find_spec("jax_triton") is not None and has_plugin()
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs the extra cuda13")

#: (B, T, S, H, G, K)
LLAMA = (4, 4096, 4096, 32, 8, 128)
RAGGED = (3, 1000, 700, 6, 2, 96)

CASES = [
    ("8.0", LLAMA, "causal"),
    ("8.9", LLAMA, "packed"),
    ("9.0", RAGGED, "packed window general"),
    ("10.0", LLAMA, "window"),
]
MORE = [
    *(("9.0", (2, 4096, 4096, 8, 2, K), "packed general") for K in range(16, 257, 16)),
    *itertools.product(GPU, [RAGGED], MASKS),
]


def on(capability: str, axes=(1,), names=("x",)):
    """A mesh of GPUs that are not there."""
    device = AbstractDevice(GPU[capability], 100, "gpu")
    types = (AxisType.Auto,) * len(axes)
    return AbstractMesh(axes, names, axis_types=types, abstract_device=device)


def lowered(mesh, fn, *arguments) -> str:
    how = contextlib.nullcontext() if HAS_TRITON else sources()
    with jax.sharding.use_abstract_mesh(mesh), how:
        traced = jax.jit(fn).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def calls(text: str) -> int:
    """Count the calls of Triton kernels in a lowered program."""
    return text.count(f"@{TARGET}(")


def programs(capability: str, x: dict):
    """The forward and the backward with the block sizes of a GPU, and their arguments."""
    K = x["q"].shape[3]
    forward = functools.partial(triton.forward, blocks=default_forward(K, capability))
    backward = functools.partial(triton.backward, blocks=default_backward(K, capability))
    return (forward, [x[name] for name in NAMES[:4]]), (backward, list(x.values()))


@pytest.mark.parametrize(
    ("capability", "shape", "mask"),
    slow_but(CASES, dict.fromkeys([*CASES, *MORE])),
    ids=str,
)
def test_lowers(capability, shape, mask):
    x = shapes_of(shape, mask)
    mesh = on(capability)
    (forward, of_forward), (backward, of_backward) = programs(capability, x)
    with compiling_for(Platform("gpu", GPU[capability], capability)):
        assert calls(lowered(mesh, forward, *of_forward)) == 1
        assert calls(lowered(mesh, backward, *of_backward)) == 2


def test_under_shard_map():
    """Results vary over the axes that q, k and v do: rows and heads; the mask, over rows alone."""
    mesh = on("8.0", (2, 2), ("data", "tensor"))
    rows, heads = PartitionSpec("data"), PartitionSpec("data", None, "tensor")
    x = shapes_of((4, 512, 512, 8, 4, 128), "packed window general")

    def loss(q, k, v, mask):
        out, lse = attention(q, k, v, mask, backend="triton")
        for y in (out, lse):
            assert jax.typeof(y).manual_axis_type == jax.typeof(q).manual_axis_type
        return jax.lax.psum(out.astype(jnp.float32).sum() + lse.sum(), ("data", "tensor"))

    gradients = jax.shard_map(
        jax.grad(loss, argnums=(0, 1, 2)),
        mesh=mesh,
        in_specs=(heads, heads, heads, rows),
        out_specs=(heads, heads, heads),
        check_vma=True,
    )
    with compiling_for(Platform("gpu", GPU["8.0"], "8.0")):
        assert calls(lowered(mesh, gradients, *(x[name] for name in NAMES[:4]))) == 3


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("K", [64, 96, 128, 256])
@pytest.mark.parametrize("name", ["a100", "h200", "b200"])
def test_compiles(name, K):
    gpu = GPUS[name]
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(gpu), topology="1x1x1"
    )
    mesh = Mesh(np.array(topology.devices), ("x",), axis_types=(AxisType.Auto,))
    here = NamedSharding(mesh, PartitionSpec())
    for mask in ("causal", "packed window general"):
        for program, arguments in programs(
            gpu.compute_capability, shapes_of((2, 4096, 4096, 8, 2, K), mask)
        ):
            placed = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), arguments
            )
            here_too = Platform("gpu", gpu.device_kind, gpu.compute_capability)
            with jax.set_mesh(mesh), compiling_for(here_too):
                assert TARGET in jax.jit(program).lower(*placed).compile().as_text()
