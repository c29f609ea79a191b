"""The loss of a distillation over a sharded vocabulary, and a teacher's likeliest tokens.

The gradient with respect to a logit z_v, times the temperature, is q_v - p_v at the k tokens, and
q_v - p_tail q_v / q_tail in the tail.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config
from jaxpar.features.distillation import IDS, SCORES, Distill
from jaxpar.model.embedding import vocab_shard_index
from jaxpar.model.loss import num_chunks, softcapped
from jaxpar.objectives.token_scores import Tree, chunked, head_inputs
from jaxpar.parallel.collectives import all_gather_invariant, psum, varying
from jaxpar.sharding.axes import VOCAB_AXES
from jaxpar.sharding.batch import IGNORED, Batch


@jax.named_scope("loss")
def head(
    d: Distill, top: Tree, x: jax.Array, batch: Batch, cfg: Config
) -> tuple[jax.Array, jax.Array]:
    """Compute the summed loss of a microbatch, as `Objective.head`.

    Returns:  (loss, [2]: the cross entropy and the divergence), sums over the labeled tokens.
    Communication: broadcast over PIPELINE; gather over TENSOR; that of `token_losses`.
    """
    h, w = head_inputs(top, x, cfg)
    n = num_chunks(batch.labels.size, w.shape[1], cfg.parallel.loss_chunks)
    flat = h.reshape(-1, h.shape[-1]), w, batch.labels.ravel()
    of_teacher = [a.reshape(-1, a.shape[-1]) for a in (batch.extra[IDS], batch.extra[SCORES])]
    cap = cfg.model.logits_softcap
    ce, kl = token_losses(*flat, *of_teacher, d.temperature, cap, n)
    sums = jnp.stack([jnp.sum(ce), jnp.sum(kl)])
    total = (1 - d.weight) * sums[0] + d.weight * d.temperature**2 * sums[1]
    return total, lax.stop_gradient(sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def token_losses(h_ND, head_DV, labels_N, ids_NK, scores_NK, temperature, softcap, n):
    """Compute the cross entropy and the divergence from the teacher of each token.

    Args:     h_ND, head_DV, labels_N, softcap: as `cross_entropy`. ids, scores: the teacher's
              likeliest tokens, and their log probabilities. n: number of chunks.
    Returns:  two float32 [N], 0 at IGNORED labels, the same on every rank of VOCAB_AXES.
    Communication: per chunk over VOCAB_AXES: a max and a sum of [chunk], and a sum of [chunk, K].
    """
    given = h_ND, head_DV, labels_N, ids_NK, scores_NK
    return _forward(*given, temperature, softcap, n)[0]


def _forward(h_ND, head_DV, labels_N, ids_NK, scores_NK, temperature, softcap, n):
    def of_chunk(_, chunk):
        h, labels, ids, scores = chunk
        logits, _ = _logits(h, head_DV, softcap)
        tempered, in_tail = logits / temperature, ~_among(ids, head_DV.shape[1])
        base = lax.pmax(jnp.max(logits, axis=1), VOCAB_AXES)[:, None]
        exps = jnp.exp(tempered - base / temperature)
        sums = [
            jnp.sum(jnp.exp(logits - base), axis=1),
            jnp.sum(exps, axis=1),
            jnp.sum(jnp.where(in_tail, exps, 0.0), axis=1),
        ]
        at_label = _picked(logits, labels[:, None])[:, 0]
        total, total_t, tail, label_logit, picked = psum(
            (*sums, at_label, _picked(tempered, ids)), VOCAB_AXES
        )
        base = base[:, 0]
        lse, lse_t = jnp.log(total) + base, jnp.log(total_t) + base / temperature
        log_tail = jnp.log(jnp.maximum(tail, TINY)) + base / temperature - lse_t
        rest = _tail_of(scores, head_DV.shape[1] * lax.axis_size(VOCAB_AXES))
        kl = jnp.sum(jnp.exp(scores) * (scores - (picked - lse_t[:, None])), axis=1)
        kl += jnp.where(rest > 0, rest * (jnp.log(jnp.maximum(rest, TINY)) - log_tail), 0.0)
        return None, (lse - label_logit, kl, lse, lse_t, log_tail)

    _, found = lax.scan(of_chunk, None, chunked((h_ND, labels_N, ids_NK, scores_NK), n))
    ce, kl, *lses = (a.reshape(-1)[: len(labels_N)] for a in found)
    labeled = labels_N != IGNORED
    losses = jnp.where(labeled, ce, 0.0), jnp.where(labeled, kl, 0.0)
    return losses, (h_ND, head_DV, labels_N, ids_NK, scores_NK, *lses)


def _backward(temperature, softcap, n, saved, grads):
    h_ND, head_DV, labels_N, ids_NK, scores_NK, *lses = saved
    labeled = labels_N != IGNORED
    weights = varying(tuple(jnp.where(labeled, g, 0.0) for g in grads))

    def of_chunk(d_head, chunk):
        h, labels, ids, scores, (lse, lse_t, log_tail), (of_ce, of_kl) = chunk
        logits, slope = _logits(h, head_DV, softcap)
        rows = of_ce[:, None] * _put(jnp.exp(logits - lse[:, None]), labels[:, None], -1.0)
        q = jnp.exp(logits / temperature - lse_t[:, None])
        rest = _tail_of(scores, head_DV.shape[1] * lax.axis_size(VOCAB_AXES))
        outside = 1 - rest * jnp.exp(-log_tail)
        among = _among(ids, head_DV.shape[1])
        from_teacher = _put(jnp.where(among, q, q * outside[:, None]), ids, -jnp.exp(scores))
        rows = (rows + of_kl[:, None] * from_teacher / temperature) * slope
        rows = rows.astype(h.dtype)
        d_head += jnp.dot(h.T, rows, preferred_element_type=jnp.float32)
        return d_head, jnp.dot(rows, head_DV.T)

    start = varying(jnp.zeros(head_DV.shape, jnp.float32))
    given = h_ND, *varying((labels_N, ids_NK, scores_NK, tuple(lses))), weights
    d_head, d_h = lax.scan(of_chunk, start, chunked(given, n))
    d_h = d_h.reshape(-1, d_h.shape[-1])[: len(h_ND)]
    return d_h, d_head.astype(head_DV.dtype), None, None, None


token_losses.defvjp(_forward, _backward)

#: The least probability whose logarithm is taken.
TINY = 1e-30


def _logits(h, head_DV, softcap):
    """Return a chunk's logits here, float32, and the slope of their cap."""
    logits = jnp.dot(h, head_DV, preferred_element_type=jnp.float32)
    logits = softcapped(logits, softcap)
    return logits, 1.0 if softcap is None else 1 - jnp.square(logits / softcap)


def _tail_of(scores_NK, vocab: int):
    """Return the probability that a teacher gives to all other tokens, float32 [N]."""
    if scores_NK.shape[1] == vocab:
        return jnp.zeros(len(scores_NK), jnp.float32)
    return jnp.maximum(1 - jnp.sum(jnp.exp(scores_NK), axis=1), 0.0)


def _places(ids, V: int):
    """Return the columns of tokens in this device's shard of the vocabulary, V for others."""
    column = ids - vocab_shard_index() * V
    return jnp.where((column >= 0) & (column < V), column, V)


def _picked(values_NV, ids_NK):
    """Return the values of tokens that are here, and 0 of others: [N, K]."""
    places = _places(ids_NK, values_NV.shape[1])
    found = jnp.take_along_axis(values_NV, jnp.minimum(places, values_NV.shape[1] - 1), axis=1)
    return jnp.where(places < values_NV.shape[1], found, 0.0)


def _put(values_NV, ids_NK, added):
    """Add to the values of tokens that are here, each named once in a row."""
    rows, columns = jnp.arange(len(ids_NK))[:, None], _places(ids_NK, values_NV.shape[1])
    rows, columns, added = varying((rows, columns, jnp.broadcast_to(added, ids_NK.shape)))
    return values_NV.at[rows, columns].add(added, mode="drop")


def _among(ids_NK, V: int):
    """Return which columns of this device's shard are among some tokens, bool [N, V]."""
    rows, columns = jnp.arange(len(ids_NK))[:, None], _places(ids_NK, V)
    rows, columns, zeros = varying((rows, columns, jnp.zeros((len(ids_NK), V), bool)))
    return zeros.at[rows, columns].set(True, mode="drop")


# -------- The likeliest next tokens of a teacher, from a vocabulary that is sharded over VOCAB_AXES


@jax.named_scope("loss")
def likeliest(
    top: Tree, x: jax.Array, cfg: Config, k: int, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Return the k likeliest tokens at each position, with their log probabilities.

    Args:     x: [B, T/(sequence*tensor), D], read on the last pipeline stage.
    Returns:  (int32 [B, T/sequence, k], float32 log softmax(logits / temperature) like it).
    Communication: broadcast over PIPELINE; gather over TENSOR; per chunk over VOCAB_AXES, a max and
              a sum of [chunk], and gathers of [chunk, k].
    """
    h, w = head_inputs(top, x, cfg)
    flat, V = h.reshape(-1, h.shape[-1]), w.shape[1]
    n = num_chunks(len(flat), V, cfg.parallel.loss_chunks)

    def of_chunk(_, h):
        logits = jnp.dot(h, w, preferred_element_type=jnp.float32)
        logits = softcapped(logits, cfg.model.logits_softcap) / temperature
        base = lax.pmax(jnp.max(logits, axis=1), VOCAB_AXES)
        total = psum(jnp.sum(jnp.exp(logits - base[:, None]), axis=1), VOCAB_AXES)
        own, places = lax.top_k(logits, min(k, V))
        ids = places + vocab_shard_index() * V
        every = [all_gather_invariant(a, VOCAB_AXES, 1) for a in (own, ids)]
        best, at = lax.top_k(every[0], k)
        lse = jnp.log(total) + base
        return None, (jnp.take_along_axis(every[1], at, axis=1), best - lse[:, None])

    _, found = lax.scan(of_chunk, None, chunked(flat, n))
    shape = (*h.shape[:2], k)
    ids, scores = (a.reshape(-1, k)[: len(flat)].reshape(shape) for a in found)
    return ids.astype(jnp.int32), scores
