"""Attention on the CPU: the reference backend against plain autodiff.

The masks are drawn at random: positions in any order, documents, queries that see no key, with and
without a window, for grouped heads and for other numbers of keys than of queries. The other
backends are compared with the reference one in `test_attention_gpu.py`.
"""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels.attention import AttentionMask, Choice, attention, backward, forward
from jaxpar.kernels.attention.mask import dense_mask
from jaxpar.kernels.attention.reference import EMPTY_LSE

SEEDS = range(4)

#: (B, T, S, H, G, K, documents, window): one compiled program each.
SHAPES = [
    (2, 16, 16, 4, 4, 8, False, None),
    (2, 16, 16, 4, 2, 8, True, None),
    (1, 9, 20, 6, 2, 4, True, 7),
    (2, 20, 7, 3, 1, 6, False, 5),
    (1, 1, 13, 2, 1, 4, True, None),
    (3, 5, 1, 2, 2, 2, True, 1),
]

CASES = [(shape, seed) for shape in SHAPES for seed in SEEDS]


@dataclasses.dataclass(frozen=True)
class Case:
    """A request, and cotangents for what it gives."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    mask: AttentionMask
    d_out: jax.Array
    d_lse: jax.Array


def random_case(shape, seed: int, dtype=np.float32) -> Case:
    """Values and a mask drawn from a seed. Two or three documents, mixed in any order."""
    B, T, S, H, G, K, packed, window = shape
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    positions = lambda n: rng.integers(0, 24, (B, n), dtype=np.int32)  # noqa: E731
    documents = lambda n: rng.integers(1, 4, (B, n), dtype=np.int32)  # noqa: E731
    mask = AttentionMask(
        q_positions=positions(T),
        kv_positions=positions(S),
        q_segments=documents(T) if packed else None,
        kv_segments=documents(S) if packed else None,
        window=window,
    )
    d_lse = jnp.asarray(rng.normal(size=(B, H, T)), jnp.float32)
    k, v = normal(B, S, G, K), normal(B, S, G, K)
    return Case(normal(B, T, H, K), k, v, mask, normal(B, T, H, K), d_lse)


def spelt_out(mask: AttentionMask) -> np.ndarray:
    """bool [B, T, S], query by query and key by key."""
    B, T = mask.q_positions.shape
    seen = np.zeros((B, T, mask.kv_positions.shape[1]), bool)
    for b, t, s in np.ndindex(seen.shape):
        back = int(mask.q_positions[b, t]) - int(mask.kv_positions[b, s])
        one_document = mask.q_segments is None or mask.q_segments[b, t] == mask.kv_segments[b, s]
        near = mask.window is None or back < mask.window
        seen[b, t, s] = back >= 0 and near and one_document
    return seen


def plain(q, k, v, seen):
    """(out, lse) as one would write it for autodiff; a query that sees nothing gives (0, -1e30)."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
    sees = seen.any(-1)[:, None, :]
    # A row without keys gets a harmless one, lest its NaN reach the gradients of the others.
    shown = seen[:, None] | ~sees[..., None]
    scores = jnp.where(shown, scores, -jnp.inf)
    out = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, axis=-1), v)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.where(sees.transpose(0, 2, 1)[..., None], out, 0), jnp.where(sees, lse, EMPTY_LSE)


@jax.jit
def reference_gradients(q, k, v, mask, d_out, d_lse):
    """(out, lse), (dq, dk, dv) of the reference backend."""
    run = lambda q, k, v: attention(q, k, v, mask, backend="reference")  # noqa: E731
    found, vjp = jax.vjp(run, q, k, v)
    return found, vjp((d_out, d_lse))


@jax.jit
def plain_gradients(q, k, v, seen, d_out, d_lse):
    """The same by autodiff of `plain`."""
    found, vjp = jax.vjp(lambda q, k, v: plain(q, k, v, seen), q, k, v)
    return found, vjp((d_out, d_lse))


def assert_close(found, wanted, tolerance):
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * max(1, np.abs(b).max())


@pytest.mark.parametrize(("shape", "seed"), CASES)
def test_mask(shape, seed):
    mask = random_case(shape, seed).mask
    np.testing.assert_array_equal(dense_mask(mask), spelt_out(mask))


def test_the_random_masks_hide_and_show():
    seen = [spelt_out(random_case(*case).mask) for case in CASES]
    assert sum((~s.any(-1)).any() and s.any() for s in seen) > 4, "queries without keys"
    assert 0.1 < np.mean([s.mean() for s in seen]) < 0.5


@pytest.mark.parametrize(("shape", "seed"), CASES)
def test_forward_and_backward(shape, seed):
    """Gradients of `out` and of the log-sum-exp at once."""
    c = random_case(shape, seed)
    seen = spelt_out(c.mask)
    (out, lse), grads = reference_gradients(c.q, c.k, c.v, c.mask, c.d_out, c.d_lse)
    (plain_out, plain_lse), wanted = plain_gradients(c.q, c.k, c.v, seen, c.d_out, c.d_lse)
    assert_close([out], [plain_out], 2e-6)
    sees = np.broadcast_to(seen.any(-1)[:, None], lse.shape)
    np.testing.assert_allclose(lse[sees], plain_lse[sees], rtol=2e-6, atol=2e-6)
    assert (np.asarray(lse)[~sees] == np.float32(EMPTY_LSE)).all()
    assert_close(grads, wanted, 1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_bfloat16(seed):
    c, exact = (random_case(SHAPES[1], seed, dtype) for dtype in (jnp.bfloat16, np.float32))
    (out, lse), grads = reference_gradients(c.q, c.k, c.v, c.mask, c.d_out, c.d_lse)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert all(g.dtype == jnp.bfloat16 for g in grads)
    rest = spelt_out(c.mask), exact.d_out, exact.d_lse
    (wanted, _), wanted_grads = plain_gradients(exact.q, exact.k, exact.v, *rest)
    assert_close([out, *grads], [wanted, *wanted_grads], 4e-2)


def test_a_query_that_sees_no_key_gives_and_takes_nothing():
    c = random_case(SHAPES[1], 0)
    late = dataclasses.replace(c.mask, kv_positions=np.full_like(c.mask.kv_positions, 99))
    (out, lse), grads = reference_gradients(c.q, c.k, c.v, late, c.d_out, c.d_lse)
    assert (out == 0).all() and (lse == EMPTY_LSE).all()
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("seed", SEEDS)
def test_shares_of_the_keys_add_up(seed):
    """What a ring relies on: with the output and log-sum-exp of all keys, parts of dq add up."""
    c = random_case(SHAPES[2], seed)
    run = jax.jit(backward, static_argnames="choice")
    reference = Choice("reference", "reference")
    out, lse = forward(c.q, c.k, c.v, c.mask, reference)
    whole = run(c.q, c.k, c.v, c.mask, out, lse, c.d_out, c.d_lse, choice=reference)

    def share(keys: slice):
        mask = dataclasses.replace(
            c.mask,
            kv_positions=c.mask.kv_positions[:, keys],
            kv_segments=c.mask.kv_segments[:, keys],
        )
        rest = mask, out, lse, c.d_out, c.d_lse
        return run(c.q, c.k[:, keys], c.v[:, keys], *rest, choice=reference)

    first, second = share(slice(0, 10)), share(slice(10, None))
    assert_close([first[0] + second[0]], whole[:1], 1e-6)
    joined = [np.concatenate(pair, axis=1) for pair in zip(first[1:], second[1:], strict=True)]
    assert_close(joined, whole[1:], 1e-6)


def test_keys_out_of_sight_have_no_influence():
    c = random_case(SHAPES[2], 1)
    seen = spelt_out(c.mask)
    unseen = ~seen.any(axis=1)[..., None, None]
    assert unseen.any() and seen.any()
    k, v = (jnp.where(unseen, 1e4, x) for x in (c.k, c.v))
    found, changed = (
        reference_gradients(c.q, k, v, c.mask, c.d_out, c.d_lse) for k, v in ((c.k, c.v), (k, v))
    )
    chex.assert_trees_all_equal(found, changed)
