"""Cross entropy over a sharded vocabulary, without storing all logits at once.

Tokens are processed in chunks or all at once. The gradients of the hidden states and the head are
computed while a chunk's logits exist. The logits are therefore computed only once, and the backward
pass only scales. Vocabulary shards exchange three values per token.

The gradient with respect to a row of logits is scale * exp(logit - base), where a value is
subtracted from the exponential at the label. The scale and that value depend on the row's sum and
are applied later. In the head's gradient, the scale is applied to the hidden states; the gradient
of the hidden states is scaled itself. So a single pass can compute the sums and write the
exponentials (`kernels/softmax.py`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels import softmax
from jaxpar.model.embedding import vocab_shard_index
from jaxpar.parallel.collectives import psum, varying
from jaxpar.sharding.axes import VOCAB_AXES
from jaxpar.sharding.batch import IGNORED


class LossWeights(NamedTuple):
    """Weights of the losses beside the cross entropy: numbers, or float32 scalars."""

    z_loss: jax.Array | float
    mtp_loss: jax.Array | float


#: Maximum bytes of a chunk's float32 logits: 2,048 tokens of Llama 3's vocabulary on one device.
#: The figures of docs/benchmarks use this limit. It is small compared with the activations.
CHUNK_BYTES = 1 << 30

#: Minimum of the logarithm of exp(base) / sum for a row of a device's logits. It avoids a division
#: by zero, and is below the rounding of the label's value.
MIN_LOG_SHARE = -60.0


def cross_entropy(
    h_ND,
    head_DV,
    labels_N,
    z_loss: jax.Array | float = 0.0,
    logits_dtype: Any = jnp.float32,
    chunks: int = 0,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the summed cross entropy of this device's tokens.

    Args:     h_ND: normalized hidden states, the same on every rank of VOCAB_AXES but typed as
              varying. head_DV: this device's columns, compute dtype. labels_N: int32, typed as
              invariant over VOCAB_AXES; IGNORED for tokens without loss. z_loss: weight of the
              squared log-partition function; an array if it changes by step. logits_dtype: dtype to
              which logits are rounded; all else is float32. chunks: number of chunks; 0 chooses it
              (`num_chunks`). softcap: of the logits (`softcapped`).
    Returns:  (loss + z-loss, loss), float32 scalars, sums over the labeled tokens, the same on
              every rank of VOCAB_AXES. The second has no gradient.
    Communication: per chunk over VOCAB_AXES: all-reduces of [chunk] float32, one max and two sums.
    Source:   Shoeybi et al. 2019 (1909.08053), section 3; z-loss: 2204.02311, section 5.
    """
    n = num_chunks(len(labels_N), head_DV.shape[1], chunks)
    now, fixed = (None, z_loss) if isinstance(z_loss, float | int) else (z_loss, 0.0)
    total, nll = _cross_entropy(h_ND, head_DV, labels_N, now, fixed, logits_dtype, n, softcap)
    return total, lax.stop_gradient(nll)


def num_chunks(num_tokens: int, vocab_shard: int, wanted: int = 0) -> int:
    """Return the number of chunks: `wanted`, but at most one per token.

    0 means the fewest chunks whose float32 logits fit in CHUNK_BYTES.
    """
    fewest = -(-num_tokens * vocab_shard * 4 // CHUNK_BYTES)
    return min(wanted or max(fewest, 1), num_tokens)


def softcapped(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Compute softcap * tanh(logits / softcap), in the dtype of the logits. None: the logits.

    Source:   Gemma 2 (2408.00118), section 2.
    """
    if softcap is None:
        return logits
    return (softcap * jnp.tanh(logits.astype(jnp.float32) / softcap)).astype(logits.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _cross_entropy(h_ND, head_DV, labels_N, z_now, z_fixed, logits_dtype, n, softcap):
    z_loss = z_fixed if z_now is None else z_now

    def body(sums, chunk):
        h, labels = chunk
        part, _ = _chunk(h, labels, head_DV, z_loss, logits_dtype, softcap)
        return _add(sums, part), None

    return lax.scan(body, _no_loss(labels_N), _chunked(h_ND, labels_N, n))[0]


def _chunked(h_ND, labels_N, n):
    """Split tokens into equal chunks. The last is padded with tokens without loss."""
    missing = -len(labels_N) % n
    h = jnp.pad(h_ND, ((0, missing), (0, 0)))
    labels = jnp.pad(labels_N, (0, missing), constant_values=IGNORED)
    return h.reshape(n, -1, h.shape[-1]), labels.reshape(n, -1)


def _no_loss(labels_N):
    """Return zero sums with the type of the loss: invariant over VOCAB_AXES, like the labels."""
    zero = jnp.sum(jnp.zeros_like(labels_N, jnp.float32))
    return zero, zero


def _add(a, b):
    return jax.tree.map(jnp.add, a, b)


def _chunk(h_ND, labels_N, head_DV, z_loss, logits_dtype, softcap, with_gradient=False):
    """Compute (loss + z-loss, loss) of a chunk and, if requested, `_gradient` of the first."""
    logits = softcapped(jnp.dot(h_ND, head_DV, preferred_element_type=logits_dtype), softcap)
    V = head_DV.shape[1]
    local = labels_N - vocab_shard_index() * V
    held = (local >= 0) & (local < V)
    own_logit = jnp.take_along_axis(logits, jnp.where(held, local, 0)[:, None], axis=1)[:, 0]
    own_logit = jnp.where(held, own_logit.astype(jnp.float32), 0.0)
    written = None
    if with_gradient and h_ND.dtype != jnp.float16:  # float16 overflows above 65,504
        # Read the labels' logits first: the exponentials may overwrite the logits.
        logits, own_logit = lax.optimization_barrier((logits, own_logit))
        written, own_base, own_sum = softmax.exponentials(logits, dtype=h_ND.dtype)
    else:
        own_base, own_sum = softmax.base_and_sum(logits)
    base = lax.pmax(own_base, VOCAB_AXES)
    total, label_logit = psum((own_sum * jnp.exp(own_base - base), own_logit), VOCAB_AXES)
    lse = jnp.log(total) + base
    weight = jnp.where(labels_N == IGNORED, 0.0, 1.0)
    nll = jnp.sum((lse - label_logit) * weight)
    loss = nll + z_loss * jnp.sum(jnp.square(lse) * weight)
    if not with_gradient:
        return (loss, nll), None
    if written is None:
        own_base = varying(lse)
        written = jnp.exp(logits.astype(jnp.float32) - own_base[:, None]).astype(h_ND.dtype)
    label = jnp.where(held, local, V), own_logit
    rows, scale = _gradient(written, own_base, lse, *label, weight, z_loss)
    return (loss, nll), (_through_softcap(rows, logits, softcap), scale)


def _through_softcap(rows_NV, logits_NV, softcap: float | None):
    """Multiply the gradient of capped logits by the derivative of `softcapped`, 1 - tanh^2."""
    if softcap is None:
        return rows_NV
    slope = 1 - jnp.square(logits_NV.astype(jnp.float32) / softcap)
    return (rows_NV.astype(jnp.float32) * slope).astype(rows_NV.dtype)


def _gradient(written_NV, base_N, lse_N, label_N, label_logit_N, weight_N, z_loss):
    """Compute the gradient of loss and z-loss by the local logits, as a product of two factors.

    The gradient is weight (p (1 + 2 z lse) - 1 at the label). The label's element is much larger
    than the others, so the second factor corrects its rounding. This adds a relative error of one
    rounding to the others.

    Args:     written: exp(logit - base). label: a column, or V for none.
    Returns:  [N, V], which reuses the memory of `written`, and float32 [N].
    """
    share = jnp.exp(jnp.maximum(base_N - lse_N, MIN_LOG_SHARE))  # p = share * written
    slope = 1 + 2 * z_loss * lse_N
    least = 1e-6 if written_NV.dtype != jnp.float16 else 2e-5  # negligible, but not zero
    slope = jnp.where(jnp.abs(slope) < least, least, slope)
    exact = jnp.exp(label_logit_N - base_N) - 1 / (slope * share)
    kept = jnp.finfo(written_NV.dtype)
    rounded = lax.reduce_precision(exact, kept.nexp, kept.nmant)
    here = (label_N < written_NV.shape[1]) & (rounded != 0)
    made_up = jnp.where(here, exact / jnp.where(here, rounded, 1.0), 1.0)
    # If it rounds to zero, float16 may still represent it with fewer digits.
    at_label = jnp.where(here, rounded, exact)
    return _put(written_NV, label_N, at_label), weight_N * slope * share * made_up


def _put(x_NV, column_N, value_N):
    """Set one element of each row; none if the column is V."""
    row, column, value = varying((jnp.arange(len(x_NV)), column_N, value_N.astype(x_NV.dtype)))
    return x_NV.at[row, column].set(value, mode="drop", unique_indices=True)


def _scaled(x_ND, scale_N):
    return (x_ND * scale_N[:, None]).astype(x_ND.dtype)


def _forward(h_ND, head_DV, labels_N, z_now, z_fixed, logits_dtype, n, softcap):
    z_loss = z_fixed if z_now is None else z_now

    def of_chunk(h, labels, dtype):
        chunk = h, labels, head_DV, z_loss, logits_dtype, softcap
        sums, factors = _chunk(*chunk, with_gradient=True)
        assert factors is not None
        rows, scale = factors
        d_head = jnp.dot(_scaled(h, scale).T, rows, preferred_element_type=dtype)
        return sums, (jnp.dot(rows, head_DV.T), scale), d_head

    def body(carry, chunk):
        h, labels = chunk
        sums, d_h, d_head = of_chunk(h, labels, jnp.float32)
        return _add(carry, (sums, d_head)), d_h

    # Not yet divided by the number of tokens, so the values may exceed the range of float16.
    kept = jnp.float32 if head_DV.dtype == jnp.float16 else head_DV.dtype
    if n == 1:  # nothing to accumulate: the matmul writes the result in its final dtype
        sums, d_h, d_head = of_chunk(h_ND, labels_N, kept)
        return sums, (d_h, d_head)
    start = _no_loss(labels_N), varying(jnp.zeros(head_DV.shape, jnp.float32))
    (sums, d_head), d_h = lax.scan(body, start, _chunked(h_ND, labels_N, n))
    d_h = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[: len(h_ND)], d_h)
    return sums, (d_h, d_head.astype(kept))


def _backward(z_fixed, logits_dtype, n, softcap, saved, cotangents):
    (d_h, scale), d_head = saved
    g = cotangents[0]
    return _scaled(d_h, g * scale), (g * d_head).astype(d_h.dtype), None, None


_cross_entropy.defvjp(_forward, _backward)
