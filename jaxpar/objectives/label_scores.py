"""Log probabilities of labels over a sharded vocabulary, each with a gradient of its own.

`model/loss.py` sums the cross entropy of tokens that count alike, so it can take the gradient in
the forward pass. Here the weight of a token is known only after the loss: the backward computes the
logits of a chunk again.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config
from jaxpar.model.embedding import vocab_shard_index
from jaxpar.model.fused_weights import TOP_DIMS, only
from jaxpar.model.loss import num_chunks, softcapped
from jaxpar.model.transformer import before_logits
from jaxpar.model.weights import gather
from jaxpar.parallel.collectives import psum, varying
from jaxpar.parallel.pipeline.stages import broadcast_from_last_stage
from jaxpar.parallel.tensor.sequence import gather_sequence
from jaxpar.sharding.axes import VOCAB_AXES
from jaxpar.sharding.batch import IGNORED

type Tree = dict[str, Any]


def of_stream(top: Tree, x: jax.Array, labels: jax.Array, cfg: Config) -> jax.Array:
    """Compute the log probability of each label from the last stage's residual stream.

    Args:     x: [B, T/(sequence*tensor), D], read on the last pipeline stage. labels: int32
              [B, T/sequence]; IGNORED gives 0.
    Returns:  float32 like `labels`, the same on every rank of VOCAB_AXES.
    Communication: broadcast over PIPELINE; gather over TENSOR; that of `log_probs`.
    """
    h, w = head_inputs(top, x, cfg)
    chunks = num_chunks(labels.size, w.shape[1], cfg.parallel.loss_chunks)
    dtype = jnp.float32 if cfg.model.logits_dtype == "float32" else w.dtype
    flat = h.reshape(-1, h.shape[-1]), w, labels.ravel()
    return log_probs(*flat, dtype, chunks, cfg.model.logits_softcap).reshape(labels.shape)


def head_inputs(top: Tree, x: jax.Array, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """Return the normalized hidden states [B, T/sequence, D], and this device's head [D, V]."""
    h = gather_sequence(broadcast_from_last_stage(before_logits(top, x, cfg.model)))
    w = gather(only(top, "head"), TOP_DIMS, cfg)["head"]
    return lax.optimization_barrier((h, w))  # as in `transformer.token_loss`


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def log_probs(h_ND, head_DV, labels_N, logits_dtype, n, softcap) -> jax.Array:
    """Compute log softmax(h head) at each label.

    Args:     as `cross_entropy`; n: number of chunks.
    Returns:  float32 [N], 0 at IGNORED labels, the same on every rank of VOCAB_AXES.
    Communication: per chunk over VOCAB_AXES: all-reduces of [chunk] float32, one max and two sums.
    """
    return _forward(h_ND, head_DV, labels_N, logits_dtype, n, softcap)[0]


def _forward(h_ND, head_DV, labels_N, logits_dtype, n, softcap):
    def of_chunk(_, chunk):
        h, labels = chunk
        logits, at_label, _ = _logits(h, head_DV, labels, logits_dtype, softcap)
        base = lax.pmax(jnp.max(logits, axis=1), VOCAB_AXES)
        own = jnp.sum(jnp.exp(logits - base[:, None]), axis=1)
        total, label_logit = psum((own, jnp.sum(at_label * logits, axis=1)), VOCAB_AXES)
        return None, (label_logit, jnp.log(total) + base)

    _, found = lax.scan(of_chunk, None, chunked((h_ND, labels_N), n))
    label_logit, lse = (a.reshape(-1)[: len(labels_N)] for a in found)
    scores = jnp.where(labels_N == IGNORED, 0.0, label_logit - lse)
    return scores, (h_ND, head_DV, labels_N, lse)


def _backward(logits_dtype, n, softcap, saved, grad_N):
    h_ND, head_DV, labels_N, lse_N = saved
    weight = varying(jnp.where(labels_N == IGNORED, 0.0, grad_N))

    def of_chunk(d_head, chunk):
        h, labels, lse, g = chunk
        logits, at_label, slope = _logits(h, head_DV, labels, logits_dtype, softcap)
        rows = g[:, None] * (at_label - jnp.exp(logits - lse[:, None])) * slope
        rows = rows.astype(h.dtype)
        d_head += jnp.dot(h.T, rows, preferred_element_type=jnp.float32)
        return d_head, jnp.dot(rows, head_DV.T)

    start = varying(jnp.zeros(head_DV.shape, jnp.float32))
    parts = chunked((h_ND, labels_N, varying(lse_N), weight), n)
    d_head, d_h = lax.scan(of_chunk, start, parts)
    d_h = d_h.reshape(-1, d_h.shape[-1])[: len(h_ND)]
    return d_h, d_head.astype(head_DV.dtype), None


log_probs.defvjp(_forward, _backward)


def _logits(h, head_DV, labels, logits_dtype, softcap):
    """Return a chunk's logits here and where the labels are, float32, and the cap's slope."""
    plain = jnp.dot(h, head_DV, preferred_element_type=logits_dtype)
    logits = softcapped(plain, softcap).astype(jnp.float32)
    column = labels - vocab_shard_index() * head_DV.shape[1]
    at_label = (jnp.arange(head_DV.shape[1]) == column[:, None]).astype(jnp.float32)
    slope = 1.0 if softcap is None else 1 - jnp.square(logits / softcap)
    return logits, at_label, slope


def chunked(arrays, n):
    """Split arrays [N, ...] into equal chunks [n, N/n, ...]. The last is padded with zeros, whose
    results nothing reads."""

    def one(a):
        padded = jnp.pad(a, ((0, -len(a) % n), *[(0, 0)] * (a.ndim - 1)))
        return padded.reshape(n, -1, *a.shape[1:])

    return jax.tree.map(one, arrays)
