"""What a model says of each token over a sharded vocabulary, each value with a gradient of its own.

    label       the logit of the label
    logsumexp   of the logits
    mean        of the logits over the vocabulary
    entropy     of the predicted distribution, logsumexp - sum p z

`model/loss.py` sums the cross entropy of tokens that count alike, so it can take the gradient in
the forward pass. Here the weight of a token is known only after the loss: the backward computes the
logits of a chunk again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config
from jaxpar.model.embedding import vocab_shard_index
from jaxpar.model.fused_weights import TOP_DIMS, only
from jaxpar.model.loss import num_chunks, softcapped
from jaxpar.model.transformer import before_logits
from jaxpar.model.weights import gather
from jaxpar.parallel.collectives import broadcast_from_last_stage, psum, varying
from jaxpar.parallel.tensor.shards import gather_sequence
from jaxpar.sharding.axes import VOCAB_AXES
from jaxpar.sharding.batch import IGNORED

type Tree = dict[str, Any]

LABEL, LOGSUMEXP, MEAN, ENTROPY = "label", "logsumexp", "mean", "entropy"


class Options(NamedTuple):
    """What the scores of tokens are computed for."""

    wanted: tuple[str, ...]
    logits_dtype: Any
    """Dtype to which logits are rounded; all else is float32."""
    chunks: int
    softcap: float | None


def log_probs(top: Tree, x: jax.Array, labels: jax.Array, cfg: Config) -> jax.Array:
    """Compute the log probability of each label from the last stage's residual stream.

    Args, Communication: as `of_stream`.
    Returns:  float32 like `labels`, 0 at IGNORED, the same on every rank of VOCAB_AXES.
    """
    found = of_stream(top, x, labels, cfg, (LABEL, LOGSUMEXP))
    return jnp.where(labels == IGNORED, 0.0, found[LABEL] - found[LOGSUMEXP])


def of_stream(
    top: Tree, x: jax.Array, labels: jax.Array, cfg: Config, wanted: tuple[str, ...]
) -> dict[str, jax.Array]:
    """Compute scores of tokens from the last stage's residual stream.

    Args:     x: [B, T/(sequence*tensor), D], read on the last pipeline stage. labels: int32
              [B, T/sequence]. wanted: names of scores.
    Returns:  float32 like `labels`, the same on every rank of VOCAB_AXES, by name.
    Communication: broadcast over PIPELINE; that of `of_hidden`.
    """
    return of_hidden(
        top, broadcast_from_last_stage(before_logits(top, x, cfg.model)), labels, cfg, wanted
    )


def of_hidden(
    top: Tree, h: jax.Array, labels: jax.Array, cfg: Config, wanted: tuple[str, ...]
) -> dict[str, jax.Array]:
    """Compute scores of tokens from normalized hidden states, `of_stream` after its broadcast.

    Communication: gather over TENSOR; that of `token_scores`.
    """
    h, w = _gathered(top, h, cfg)
    dtype = jnp.float32 if cfg.compute.logits_dtype == "float32" else w.dtype
    chunks = num_chunks(labels.size, w.shape[1], cfg.parallel.loss_chunks)
    options = Options(wanted, dtype, chunks, cfg.model.logits_softcap)
    found = token_scores(h.reshape(-1, h.shape[-1]), w, labels.ravel(), options)
    return {name: a.reshape(labels.shape) for name, a in zip(wanted, found, strict=True)}


def head_inputs(top: Tree, x: jax.Array, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """Return the normalized hidden states [B, T/sequence, D], and this device's head [D, V]."""
    return _gathered(top, broadcast_from_last_stage(before_logits(top, x, cfg.model)), cfg)


def _gathered(top: Tree, h: jax.Array, cfg: Config) -> tuple[jax.Array, jax.Array]:
    h = gather_sequence(h)
    w = gather(only(top, "head"), TOP_DIMS, cfg)["head"]
    return lax.optimization_barrier((h, w))  # as in `transformer.token_loss`


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def token_scores(h_ND, head_DV, labels_N, options: Options) -> tuple[jax.Array, ...]:
    """Compute scores of the distributions softmax(h head).

    Args:     h_ND, head_DV, labels_N: as `cross_entropy`.
    Returns:  float32 [N] for each of `options.wanted`, the same on every rank of VOCAB_AXES. The
              label's logit is 0 at IGNORED.
    Communication: per chunk over VOCAB_AXES: all-reduces of [chunk] float32, one max, and a sum for
              each score and for the sum of exponentials.
    """
    return _forward(h_ND, head_DV, labels_N, options)[0]


def _forward(h_ND, head_DV, labels_N, options):
    vocab = head_DV.shape[1] * lax.axis_size(VOCAB_AXES)

    def of_chunk(_, chunk):
        h, labels = chunk
        logits, at_label, _ = _logits(h, head_DV, labels, options)
        base = lax.pmax(jnp.max(logits, axis=1), VOCAB_AXES)
        exps = jnp.exp(logits - base[:, None])
        own = {LOGSUMEXP: jnp.sum(exps, axis=1)}
        if LABEL in options.wanted:
            own[LABEL] = jnp.sum(at_label * logits, axis=1)
        if MEAN in options.wanted:
            own[MEAN] = jnp.sum(logits, axis=1) / vocab
        if ENTROPY in options.wanted:
            own[ENTROPY] = jnp.sum(exps * logits, axis=1)
        found = psum(own, VOCAB_AXES)
        total = found[LOGSUMEXP]
        found[LOGSUMEXP] = lse = jnp.log(total) + base
        if ENTROPY in options.wanted:
            found[ENTROPY] = lse - found[ENTROPY] / total
        return None, found

    _, found = lax.scan(of_chunk, None, chunked((h_ND, labels_N), options.chunks))
    found = {name: a.reshape(-1)[: len(labels_N)] for name, a in found.items()}
    saved = {name: found[name] for name in (LOGSUMEXP, ENTROPY) if name in found}
    return tuple(found[name] for name in options.wanted), (h_ND, head_DV, labels_N, saved)


def _backward(options, saved, grads):
    h_ND, head_DV, labels_N, found = saved
    vocab = head_DV.shape[1] * lax.axis_size(VOCAB_AXES)

    def of_chunk(d_head, chunk):
        h, labels, scores, g = chunk
        logits, at_label, slope = _logits(h, head_DV, labels, options)
        lse = scores[LOGSUMEXP][:, None]
        rows = jnp.zeros_like(logits)
        if LABEL in g:
            rows += g[LABEL] * at_label
        if MEAN in g:
            rows += g[MEAN] / vocab
        if g.keys() & {LOGSUMEXP, ENTROPY}:
            factor = jnp.float32(0)
            if LOGSUMEXP in g:
                factor += g[LOGSUMEXP]
            if ENTROPY in g:  # -p (z - sum p z)
                factor += g[ENTROPY] * (lse - scores[ENTROPY][:, None] - logits)
            rows += factor * jnp.exp(logits - lse)
        rows = (rows * slope).astype(h.dtype)
        d_head += jnp.dot(h.T, rows, preferred_element_type=jnp.float32)
        return d_head, jnp.dot(rows, head_DV.T)

    start = varying(jnp.zeros(head_DV.shape, jnp.float32))
    weights = {name: g[:, None] for name, g in zip(options.wanted, grads, strict=True)}
    parts = chunked((h_ND, labels_N, *varying((found, weights))), options.chunks)
    d_head, d_h = lax.scan(of_chunk, start, parts)
    d_h = d_h.reshape(-1, d_h.shape[-1])[: len(h_ND)]
    return d_h, d_head.astype(head_DV.dtype), None


token_scores.defvjp(_forward, _backward)


def _logits(h, head_DV, labels, options):
    """Return a chunk's logits here and where the labels are, float32, and the cap's slope."""
    plain = jnp.dot(h, head_DV, preferred_element_type=options.logits_dtype)
    logits = softcapped(plain, options.softcap).astype(jnp.float32)
    column = labels - vocab_shard_index() * head_DV.shape[1]
    at_label = (jnp.arange(head_DV.shape[1]) == column[:, None]).astype(jnp.float32)
    slope = 1.0 if options.softcap is None else 1 - jnp.square(logits / options.softcap)
    return logits, at_label, slope


def chunked(arrays, n):
    """Split arrays [N, ...] into equal chunks [n, N/n, ...]. The last is padded with zeros, whose
    results nothing reads."""

    def one(a):
        padded = jnp.pad(a, ((0, -len(a) % n), *[(0, 0)] * (a.ndim - 1)))
        return padded.reshape(n, -1, *a.shape[1:])

    return jax.tree.map(one, arrays)
