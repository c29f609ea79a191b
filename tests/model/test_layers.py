"""The pieces of a block, each against its formula written out in numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.config import Attention, Glu, Layer, Model, ParallelConfig, Rope, RopeScaling
from jaxpar.kernels.norm import NormOutput, rms_norm
from jaxpar.model import attention, embedding, feed_forward, rope
from jaxpar.parallel.collectives import varying
from jaxpar.sharding.axes import TENSOR, VOCAB_AXES
from jaxpar.sharding.mesh import make_mesh


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# --------------------------------------------------------------------------------- RMSNorm


def test_rms_norm():
    x, gain = normal(2, 3, 8) * 3, normal(8, seed=1)
    wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain
    np.testing.assert_allclose(rms_norm(x, gain, 1e-5), wanted, rtol=1e-6)


def test_rms_norm_adds_eps_inside_the_root():
    x = np.full((1, 4), 1e-3, np.float32)
    found = rms_norm(x, np.ones(4, np.float32), 3e-6)
    np.testing.assert_allclose(found, np.full((1, 4), 0.5), rtol=1e-5)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    """Squares of 300 sum to more than bfloat16's 8 bits hold; the result is a bfloat16 again."""
    x = jnp.asarray(300 + 10 * normal(4, 4096), jnp.bfloat16)
    found = rms_norm(x, np.ones(4096, np.float32), 1e-5)
    x64 = np.asarray(x, np.float64)
    wanted = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2**-8)


# ------------------------------------------------------------------------------------ RoPE


def published_frequencies(of: Rope, head_dim: int) -> np.ndarray:
    """As the Llama 3.1 authors' code has it, frequency by frequency, in float64."""
    s, found = of.scaling, []
    for pair in range(head_dim // 2):
        freq = of.theta ** (-2 * pair / head_dim)
        wavelen = 2 * math.pi / freq
        if s is None or wavelen < s.original_max_position / s.high_freq_factor:
            found.append(freq)
        elif wavelen > s.original_max_position / s.low_freq_factor:
            found.append(freq / s.factor)
        else:
            smooth = s.original_max_position / wavelen - s.low_freq_factor
            smooth /= s.high_freq_factor - s.low_freq_factor
            found.append((1 - smooth) * freq / s.factor + smooth * freq)
    return np.array(found)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling(),
        RopeScaling(factor=32.0),
        RopeScaling(
            factor=4.0, low_freq_factor=0.5, high_freq_factor=8.0, original_max_position=64
        ),
    ],
)
def test_rope_frequencies(scaling):
    of = Rope(theta=500_000.0, scaling=scaling)
    found = rope.rope_frequencies(of, 128)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, published_frequencies(of, 128), rtol=2e-6)


def test_rope_scaling_keeps_fast_stretches_slow_and_ramps_between():
    plain, scaled = (rope.rope_frequencies(Rope(scaling=s), 128) for s in (None, RopeScaling()))
    ratio = np.asarray(plain / scaled)
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(8)
    assert (np.diff(ratio) > -1e-5).all() and ((ratio > 1.01) & (ratio < 7.99)).any()


def turned(x, positions, frequencies):
    """Dims i and i + K/2 of each head, as one complex number, turned by position * frequency."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    z = z * np.exp(1j * positions[..., None, None] * frequencies)
    return np.concatenate([z.real, z.imag], axis=-1)


def test_rope_turns_the_halves_against_each_other():
    of = Rope(theta=100.0)
    x, positions = normal(2, 16, 3, 8), np.random.default_rng(0).integers(0, 500, (2, 16))
    tables = rope.rope_tables(positions, of, 8)
    wanted = turned(x.astype(np.float64), positions, published_frequencies(of, 8))
    # Angles up to 500 rad, float32.
    np.testing.assert_allclose(rope.rope(x, tables), wanted, atol=2e-4)
    assert rope.rope(jnp.asarray(x, jnp.bfloat16), tables).dtype == jnp.bfloat16


def test_rope_scores_depend_on_distance_alone():
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)

    def score(q_position, k_position):
        at = lambda x, p: rope.rope(x, rope.rope_tables(np.array([[p]]), Rope(theta=100.0), 8))  # noqa: E731
        return float(jnp.sum(at(q, q_position) * at(k, k_position)))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


# ------------------------------------------------------------------------------ feed-forward


def test_swiglu_and_its_gradient():
    gate, up, d = normal(2, 3, 4) * 2, normal(2, 3, 4, seed=1), normal(2, 3, 4, seed=2)
    found, vjp = jax.vjp(feed_forward.kernel_of(Glu(d_ff=4)).hidden, gate, up)
    opened = 1 / (1 + np.exp(-gate))
    np.testing.assert_allclose(found, gate * opened * up, rtol=1e-5, atol=1e-6)
    d_gate, d_up = vjp(d)
    np.testing.assert_allclose(d_up, d * gate * opened, rtol=1e-5, atol=1e-6)
    slope = up * opened * (1 + gate * (1 - opened))
    np.testing.assert_allclose(d_gate, d * slope, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------- projections


@pytest.mark.parametrize("bias", [False, True])
def test_project_qkv_takes_heads_apart_in_order(bias, devices):
    a = Attention(num_heads=4, num_kv_heads=2, head_dim=4)
    m = Model(d_model=6, vocab_size=8, layers=[Layer("layers", a, Glu(8))])
    mesh = make_mesh(ParallelConfig(data=1), devices[:1])
    h, wq, wk, wv = normal(2, 3, 6), normal(6, 16), normal(6, 8, seed=1), normal(6, 8, seed=2)
    w = {"wqkv": np.concatenate([wq, wk, wv], axis=1)}
    b = np.zeros(32, np.float32)
    if bias:
        b = w["bqkv"] = normal(32, seed=3)
    P = PartitionSpec
    run = jax.shard_map(
        lambda h, w: attention.qkv(NormOutput(h), w, a, m), mesh=mesh, in_specs=P(), out_specs=P()
    )
    q, k, v = run(h, w)
    np.testing.assert_allclose(q, (h @ wq + b[:16]).reshape(2, 3, 4, 4), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(k, (h @ wk + b[16:24]).reshape(2, 3, 2, 4), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(v, (h @ wv + b[24:]).reshape(2, 3, 2, 4), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------- embedding

V, D = 16, 4


def lookup_on(devices, sizes: dict, table, tokens, d_rows):
    """(rows, gradient of the table), from the shards of VOCAB_AXES."""
    n = int(np.prod(list(sizes.values()), initial=1))
    mesh = make_mesh(ParallelConfig(**{"data": 1} | sizes), devices[:n])

    def local(table, tokens, d_rows):
        look_up = lambda w: embedding.embedding_lookup(w, tokens, w.shape[0], w.dtype)  # noqa: E731
        rows, vjp = jax.vjp(look_up, varying(table))
        (d_table,) = vjp(varying(d_rows).astype(rows.dtype))
        tokens_axes = tuple(a for a in mesh.axis_names if a not in VOCAB_AXES)
        total = lambda x, axes: lax.psum(x.astype(jnp.float32), axes)  # noqa: E731
        return total(rows, mesh.axis_names), total(d_table, tokens_axes)

    P = PartitionSpec
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(P(VOCAB_AXES), P(), P()), out_specs=(P(), P(VOCAB_AXES))
    )
    return jax.jit(run)(table, tokens, d_rows)


@pytest.mark.parametrize("sizes", [{}, {TENSOR: 4}, {TENSOR: 2, "pipeline": 2}])
def test_embedding_lookup(sizes, devices):
    table, tokens = normal(V, D), np.random.default_rng(0).integers(0, V, (2, 9), dtype=np.int32)
    d_rows = normal(2, 9, D, seed=1)
    rows, d_table = lookup_on(devices, sizes, table, tokens, d_rows)
    wanted = np.zeros_like(table)
    np.add.at(wanted, tokens, d_rows)
    np.testing.assert_array_equal(rows, table[tokens])
    np.testing.assert_allclose(d_table, wanted, rtol=1e-6, atol=1e-6)


def test_embedding_gradient_of_a_bfloat16_table_is_summed_in_float32(devices):
    """1000 times 1 is 1000; in bfloat16 the sum would stay at 256, where adding 1 is lost."""
    table = jnp.asarray(normal(V, D), jnp.bfloat16)
    tokens, d_rows = np.full((1, 1000), 3, np.int32), np.ones((1, 1000, D), np.float32)
    _, d_table = lookup_on(devices, {}, table, tokens, d_rows)
    assert (np.asarray(d_table)[3] == 1000).all()
    assert (np.delete(np.asarray(d_table), 3, axis=0) == 0).all()
