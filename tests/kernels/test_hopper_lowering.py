"""The Hopper kernels, lowered for CUDA on a CPU at the shapes that are trained with.

Lowering checks layouts, shared memory and registers that Mosaic GPU can place, and the types of
results under `shard_map`. It computes nothing: arrays are shapes alone.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxpar.config import ParallelConfig
from jaxpar.kernels.attention import AttentionMask, attention
from jaxpar.kernels.attention.hopper import api as pallas_hopper
from jaxpar.kernels.attention.hopper.blocks import backward_candidates, forward_candidates
from jaxpar.kernels.platform import Platform
from jaxpar.sharding.mesh import make_mesh
from tests.slow import slow, slow_but

CAUSAL = dict(in_order=True)
MASKS = {
    "causal": CAUSAL,
    "window": CAUSAL | dict(window=1024),
    "packed": CAUSAL | dict(packed=True, max_segments=64),
    "general": {},
    "packed general": dict(packed=True),
    "packed window general": dict(packed=True, window=1024),
}

#: (B, T, S, H, G, K), mask: kinds of masks, and sizes that divide nothing. Heads of 64 are lowered
#: in float16, and by the deterministic kernel.
QUICK = [
    ((3, 1000, 700, 6, 6, 128), "packed window general"),
]
PRODUCTION = [
    *(((4, 4096, 4096, 32, 8, 128), mask) for mask in MASKS),
    ((2, 8192, 8192, 32, 8, 128), "causal"),
    ((1, 32768, 32768, 32, 8, 128), "causal"),
    ((1, 32768, 32768, 32, 8, 128), "packed"),
    ((8, 4096, 4096, 32, 8, 64), "causal"),
    ((8, 4096, 4096, 32, 8, 64), "packed"),
    ((8, 4096, 4096, 32, 8, 64), "window"),
    ((4, 4096, 4096, 16, 8, 256), "causal"),
    ((4, 4096, 4096, 16, 8, 256), "packed"),
    ((1, 8192, 32768, 32, 8, 64), "packed general"),
    ((1, 8192, 32768, 32, 8, 128), "general"),
    ((1, 8192, 32768, 32, 8, 128), "packed window general"),
    ((1, 8192, 32768, 16, 8, 256), "packed window general"),
    ((3, 1000, 1000, 6, 2, 64), "causal"),
    ((3, 1000, 700, 6, 6, 128), "packed window general"),
]

NAMES = "q k v mask out lse d_out d_lse".split()


def shapes_of(shape, mask: str, dtype=jnp.bfloat16) -> dict:
    """Arguments of a backward, by name; the first four are those of a forward."""
    B, T, S, H, G, K = shape
    facts = dict(MASKS[mask])
    packed = facts.pop("packed", False)
    ids = [jax.ShapeDtypeStruct((B, n), jnp.int32) for n in (T, S)]
    whole_mask = AttentionMask(*ids, *(ids if packed else ()), **facts)
    q, k = (jax.ShapeDtypeStruct((B, n, heads, K), dtype) for n, heads in ((T, H), (S, G)))
    lse = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    return dict(zip(NAMES, (q, k, k, whole_mask, q, lse, q, lse), strict=True))


def lower(fn, *arguments):
    """The results' shapes, after lowering for CUDA."""
    traced = jax.jit(fn).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text, "no kernel of ours"
    return traced.out_info


def lower_forward(x: dict, **options) -> None:
    forward = functools.partial(pallas_hopper.forward, **options)
    check(lower(forward, *(x[name] for name in NAMES[:4])), [x["out"], x["lse"]])


def lower_backward(x: dict, **options) -> None:
    backward = functools.partial(pallas_hopper.backward, **options)
    check(lower(backward, *x.values()), [x["q"], x["k"], x["v"]])


def check(results, like) -> None:
    assert [(y.shape, y.dtype) for y in results] == [(y.shape, y.dtype) for y in like]


@pytest.mark.parametrize(("shape", "mask"), slow_but(QUICK, PRODUCTION), ids=str)
def test_production(shape, mask):
    x = shapes_of(shape, mask)
    lower_forward(x)
    lower_backward(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("K", "mask"),  # at 256 every backward is
    [*itertools.product([64, 128], ["causal", "packed", "packed window general"])],
)
def test_deterministic(K, mask):
    lower_backward(shapes_of((2, 4096, 4096, 32, 8, K), mask), deterministic=True)


@pytest.mark.parametrize("K", [*map(slow, [64, 128, 256])])
def test_float16(K):
    x = shapes_of((2, 4096, 4096, 16, 8, K), "packed", jnp.float16)
    lower_forward(x)
    lower_backward(x)


def every_size(candidates) -> list:
    """(K, blocks, mask). Slow but for one K and order of heads, where every bound must fit, too."""
    sizes = [(K, blocks) for K in (64, 128, 256) for blocks in candidates(K)]
    cases = [(*size, mask) for size in sizes for mask in ("causal", "packed window general")]
    quick = [c for c in cases if c[0] == 128 and c[1].heads == 1 and c[2] != "causal"]
    return slow_but(quick, cases)


@pytest.mark.parametrize(("K", "blocks", "mask"), every_size(forward_candidates), ids=str)
def test_forward_blocks(K, blocks, mask):
    """What the tuner tries, with every bound of a mask too: shared memory must hold it all."""
    lower_forward(shapes_of((2, 4096, 4096, 16, 8, K), mask), blocks=blocks)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("K", "blocks", "mask"), every_size(backward_candidates), ids=str)
def test_backward_blocks(K, blocks, mask, deterministic):
    x = shapes_of((2, 4096, 4096, 16, 8, K), mask)
    lower_backward(x, blocks=blocks, deterministic=deterministic)


@pytest.fixture
def hopper(monkeypatch):
    """A CPU that passes for an H200 when a backend is chosen."""
    here = Platform("gpu", "NVIDIA H200", "9.0")
    monkeypatch.setattr(Platform, "here", staticmethod(lambda: here))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("K", "deterministic", "mask"),
    [
        (128, True, "causal"),
        (64, False, "packed window general"),
        (64, False, "causal"),
        (128, True, "packed window general"),
        (128, False, "causal"),
        (128, False, "packed window general"),
        (256, False, "causal"),
        (256, False, "packed window general"),
    ],
)
def test_under_shard_map(K, deterministic, mask, devices, hopper):
    """Results vary over the axes that q, k and v do: rows and heads; the mask, over rows alone."""
    mesh = make_mesh(ParallelConfig(data=2, tensor=2), devices[:4])
    rows, heads = PartitionSpec("data"), PartitionSpec("data", None, "tensor")
    x = shapes_of((4, 512, 512, 8, 4, K), mask)
    q, k, v, whole_mask = (x[name] for name in NAMES[:4])

    def loss(q, k, v, mask):
        options = dict(backend="pallas_hopper", deterministic=deterministic)
        out, lse = attention(q, k, v, mask, **options)
        for y in (out, lse):
            assert jax.typeof(y).manual_axis_type == jax.typeof(q).manual_axis_type
        local = out.astype(jnp.float32).sum() + lse.sum()
        return jax.lax.psum(local, ("data", "tensor"))

    gradients = jax.shard_map(
        jax.grad(loss, argnums=(0, 1, 2)),
        mesh=mesh,
        in_specs=(heads, heads, heads, rows),
        out_specs=(heads, heads, heads),
        check_vma=True,
    )
    dq, dk, dv = lower(gradients, q, k, v, whole_mask)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
