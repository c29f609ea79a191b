"""The cuDNN backend on a GPU, against the reference in float32: python -m pytest -m gpu."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels.attention import AttentionMask, attention

pytestmark = pytest.mark.gpu

#: (B, T, H, G, K, documents per row or None, window)
CASES = [
    (2, 512, 8, 2, 64, None, None),
    (2, 512, 8, 2, 128, None, 100),
    (2, 512, 8, 2, 64, 5, None),
    (3, 640, 8, 8, 128, 17, None),
    (1, 512, 4, 2, 128, 5, 64),
    (1, 1024, 4, 1, 256, None, None),
]


def make_mask(rng, B: int, T: int, documents: int | None, window: int | None) -> AttentionMask:
    """Rows with different numbers of documents, `documents` in the first."""
    begins = np.zeros((B, T), bool)
    for row in range(B):
        cuts = max(0, (documents or 1) - 1 - row)
        begins[row, rng.choice(np.arange(1, T), cuts, replace=False)] = True
    segments = 1 + np.cumsum(begins, axis=1, dtype=np.int32)
    place = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    positions = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    ids = jnp.asarray(segments) if documents else None
    return AttentionMask(
        q_positions=jnp.asarray(positions),
        kv_positions=jnp.asarray(positions),
        q_segments=ids,
        kv_segments=ids,
        window=window,
        max_segments=32 if documents else None,
        in_order=True,
    )


def run(backend: str, q, k, v, d_out, mask: AttentionMask):
    """Output, log-sum-exp and the three gradients, as float32 numpy arrays."""
    (out, lse), vjp = jax.vjp(lambda q, k, v: _no_lse_gradient(backend, q, k, v, mask), q, k, v)
    grads = vjp((d_out, jnp.zeros_like(lse)))
    return [np.asarray(x, np.float32) for x in (out, lse, *grads)]


def _no_lse_gradient(backend, q, k, v, mask):
    out, lse = attention(q, k, v, mask, backend=backend)
    return out, jax.lax.stop_gradient(lse)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cudnn_agrees_with_the_reference(case):
    B, T, H, G, K, documents, window = case
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        jnp.asarray(rng.normal(size=(B, T, heads, K)), jnp.bfloat16) for heads in (H, G, G, H)
    )
    mask = make_mask(rng, B, T, documents, window)
    got = run("cudnn", q, k, v, d_out, mask)
    want = run("reference", *(x.astype(jnp.float32) for x in (q, k, v, d_out)), mask)
    error = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(got, want, strict=True)]
    assert error[1] < 1e-5, f"log-sum-exp {error[1]}"  # float32 in cuDNN too
    assert max(error) < 6e-3, error  # bfloat16 rounds to 4e-3


def test_no_gradient_leaks_between_documents():
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 512, 4, 64)), jnp.bfloat16) for _ in range(3))
    mask = make_mask(rng, 1, 512, 4, None)
    first = np.asarray(mask.q_segments[0] == 1)
    d_out = jnp.where(first[None, :, None, None], jnp.ones_like(q), 0)
    _, _, *grads = run("cudnn", q, k, v, d_out, mask)
    for grad in grads:
        assert np.all(grad[0, ~first] == 0)
        assert np.any(grad[0, first] != 0)


def test_the_gradient_of_the_log_sum_exp_is_refused():
    q = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    mask = make_mask(np.random.default_rng(0), 1, 128, None, None)
    with pytest.raises(ValueError, match="gives no gradient of the log-sum-exp"):
        jax.grad(lambda q: attention(q, q, q, mask, backend="cudnn")[1].sum())(q)
