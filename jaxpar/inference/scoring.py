"""Scores texts: the log probability of each token, given the tokens before it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpar.config import Config, ModelConfig
from jaxpar.model import decode
from jaxpar.sharding.axes import TENSOR

#: Positions per row whose logits are in memory at the same time.
POSITIONS = 128

type Scores = Callable[[Any, Any], tuple[jax.Array, jax.Array]]


@functools.cache  # compiled once for all checkpoints of a run
def make_scores(cfg: Config, mesh: Mesh, vocab_size: int) -> Scores:
    """Make the compiled (weights, tokens int32 [B, T]) -> scores of tokens 1 to T - 1.

    The weights come from `generation.weights_for_sampling`. T - 1 is a multiple of POSITIONS; rows
    are padded at the end. The scores are log probabilities in nats, float32 [B, T - 1], and whether
    each token is the most likely one at its position.

    Args:     vocab_size: of the tokenizer. Padded ids have no probability, as in an export.
    """

    def scores(weights: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = jax.tree.map(lambda a: a[0], weights)
        read, wanted = tokens[:, :-1], tokens[:, 1:]
        # Nothing reads the cache afterwards, so XLA does not compute it.
        cache = decode.empty_cache(cfg.model, *read.shape)
        lengths = jnp.full(len(read), read.shape[1], jnp.int32)
        h, _ = decode.prompt(weights, read, lengths, cache, cfg)
        return _in_pieces(weights, h, wanted, cfg.model, vocab_size)

    specs = PartitionSpec(TENSOR), PartitionSpec()
    alike = PartitionSpec(), PartitionSpec()
    apart = jax.shard_map(scores, mesh=mesh, in_specs=specs, out_specs=alike, check_vma=False)
    return jax.jit(apart)


def _in_pieces(
    weights: Any, h: jax.Array, wanted: jax.Array, m: ModelConfig, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    B, T, D = h.shape

    def piece(xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h, ids = xs
        logits = decode.logits(weights, h.reshape(-1, D), m)[:, :vocab_size]
        logits = logits.reshape(B, POSITIONS, -1)
        own = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
        return own - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == ids

    cut = lambda a: jnp.moveaxis(a.reshape(B, T // POSITIONS, POSITIONS, *a.shape[2:]), 1, 0)  # noqa: E731
    done = lax.map(piece, (cut(h), cut(wanted)))
    scores, likeliest = (jnp.moveaxis(a, 0, 1).reshape(B, T) for a in done)
    return scores, likeliest
