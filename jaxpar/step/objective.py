"""What a step minimizes: the cross entropy of tokens, also with the divergence from a teacher, or
the preference loss of pairs.

The head of the model gives sums; a step divides them by a count, of the whole batch.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.model import transformer
from jaxpar.model.loss import LossWeights
from jaxpar.objectives import distillation, pairs
from jaxpar.objectives.dpo import MEASURES
from jaxpar.parallel.collectives import psum
from jaxpar.sharding.axes import TOKEN_AXES
from jaxpar.sharding.batch import IGNORED, Batch


def count_labels(batch: Batch, axes: tuple[str, ...] = TOKEN_AXES) -> jax.Array:
    """Count the labeled tokens of the global batch, float32: exact up to 2**24, 16 million.

    Args:     axes: those over which its tokens are split.
    """
    own = jnp.sum(batch.labels != IGNORED, dtype=jnp.int32)
    return psum(own, axes).astype(jnp.float32)


def count(batch: Batch, cfg: Config) -> jax.Array:
    """Count what the loss is a mean over, float32: the labeled tokens or pairs of the batch.

    Communication: a scalar all-reduce over TOKEN_AXES.
    """
    if not cfg.dpo.beta:
        return count_labels(batch)
    return psum(pairs.count_pairs(batch), TOKEN_AXES).astype(jnp.float32)


def head_of(
    cfg: Config, weights: LossWeights, max_segments: int | None, *, trains: bool
) -> Callable:
    """Return the head of the model: (top, x, microbatch) -> `Sums`.

    Args:     weights: of losses beside the cross entropy. max_segments: as in `make_train_step`;
              two for each pair of a row. trains: False for the head of an evaluation, which has no
              teacher.
    """
    if cfg.distill.teacher and trains:
        return functools.partial(distillation.head, cfg=cfg)
    if not cfg.dpo.beta:
        return functools.partial(transformer.head, cfg=cfg, weights=weights)
    if max_segments is None:
        raise ValueError("pairs need max_segments")
    return functools.partial(pairs.head, cfg=cfg, max_pairs=max_segments // 2)


def reported(mean: jax.Array, cfg: Config) -> dict[str, jax.Array]:
    """Name the means of a step's sums, as in `StepMetrics`."""
    if cfg.dpo.beta:
        return dict(zip(MEASURES, mean, strict=True))
    if cfg.distill.teacher:
        return {"loss": mean[0], "distill_loss": mean[1]}
    if cfg.model.mtp_depth:
        return {"loss": mean[0], "mtp_loss": jnp.mean(mean[1:])}
    return {"loss": mean}
