"""The likeliest next tokens of a teacher, from a vocabulary that is sharded over VOCAB_AXES."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config
from jaxpar.model.embedding import vocab_shard_index
from jaxpar.model.loss import num_chunks, softcapped
from jaxpar.objectives.token_scores import chunked, head_inputs
from jaxpar.parallel.collectives import all_gather_invariant, psum
from jaxpar.sharding.axes import VOCAB_AXES

type Tree = dict[str, Any]


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
