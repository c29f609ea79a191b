"""What a step minimizes, as a value: a head, what its sums are means over, and their names.

The head of the model gives sums; a step divides them by a count, of the whole batch.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.config.metrics import Metric, declare
from jaxpar.execution.decisions import Execution
from jaxpar.model import transformer
from jaxpar.model.loss import LossWeights
from jaxpar.objectives import distillation, label_scores, pairs
from jaxpar.objectives.dpo import MEASURES
from jaxpar.parallel.collectives import psum
from jaxpar.sharding.axes import TOKEN_AXES
from jaxpar.sharding.batch import IGNORED, Batch

type Tree = dict[str, Any]
type Sums = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Head:
    """What the head of a step knows beside weights, residual stream and microbatch."""

    ex: Execution
    weights: LossWeights
    """Weights of losses in addition to the cross entropy."""
    context_of: Callable[[Batch], Any]
    max_segments: int | None
    trains: bool
    """False for the head of an evaluation."""

    @property
    def cfg(self) -> Config:
        return self.ex.cfg

    def log_probs(self, top: Tree, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the log probability of each label, float32 [B, T/sequence]; 0 at IGNORED."""
        return label_scores.of_stream(top, x, labels, self.cfg)


def count_labels(batch: Batch, axes: tuple[str, ...] = TOKEN_AXES) -> jax.Array:
    """Count the labeled tokens of the global batch, float32: exact up to 2**24, 16 million.

    Args:     axes: those over which its tokens are split.
    """
    own = jnp.sum(batch.labels != IGNORED, dtype=jnp.int32)
    return psum(own, axes).astype(jnp.float32)


def _loss(mean: jax.Array) -> dict[str, jax.Array]:
    return {"loss": mean}


@dataclass(frozen=True)
class Objective:
    """What a step minimizes."""

    head: Callable[[Tree, jax.Array, Batch, Head], Sums]
    """(weights outside layers, x, microbatch, Head) -> (sum to differentiate, sums to report).
    Every device calls it; x is that of the last pipeline stage."""
    count: Callable[[Batch, tuple[str, ...]], jax.Array] = count_labels
    """(batch of this device, mesh axes) -> what the sums are divided by, of the global batch."""
    report: Callable[[Any], dict[str, Any]] = _loss
    """Means of the sums -> metrics, among them "loss"."""
    metrics: dict[str, Metric] = field(default_factory=dict, hash=False, compare=False)
    """The metrics that it adds."""
    reads: tuple[str, ...] = ()
    """Names of `Batch.extra` that the loader adds: "source"."""
    reference: Callable[[Any, Batch, Config], tuple[jax.Array, jax.Array]] | None = None
    """(params, batch, cfg) -> (loss to differentiate, loss to report), of the plain model."""


def _next_token(top: Tree, x: jax.Array, mb: Batch, h: Head) -> Sums:
    return transformer.head(top, x, mb, cfg=h.cfg, weights=h.weights)


def _with_modules(top: Tree, x: jax.Array, mb: Batch, h: Head) -> Sums:
    if not h.trains:
        return _next_token(top, x, mb, h)
    return transformer.head_with_modules(
        top, x, mb, ex=h.ex, context_of=h.context_of, weights=h.weights
    )


def _of_pairs(top: Tree, x: jax.Array, mb: Batch, h: Head) -> Sums:
    if h.max_segments is None:
        raise ValueError("pairs need max_segments")
    return pairs.head(top, x, mb, cfg=h.cfg, max_pairs=h.max_segments // 2)


def _from_teacher(top: Tree, x: jax.Array, mb: Batch, h: Head) -> Sums:
    if not h.trains:
        return _next_token(top, x, mb, h)
    return distillation.head(top, x, mb, cfg=h.cfg)


def _count_pairs(batch: Batch, axes: tuple[str, ...]) -> jax.Array:
    return psum(pairs.count_pairs(batch), axes).astype(jnp.float32)


NEXT_TOKEN = Objective(_next_token)
MULTI_TOKEN = Objective(
    _with_modules,
    report=lambda mean: (
        {"loss": mean[0], "mtp_loss": jnp.mean(mean[1:])} if mean.ndim else {"loss": mean}
    ),
    metrics={
        "mtp_loss": Metric(
            "training", "nats per token", "of multi-token prediction, mean over modules"
        )
    },
)
PREFERENCES = Objective(
    _of_pairs,
    count=_count_pairs,
    report=lambda mean: dict(zip(MEASURES, mean, strict=True)),
    metrics={
        "reward_accuracy": Metric(
            "preferences", "share", "pairs whose chosen response has the higher reward"
        ),
        "reward_margin": Metric(
            "preferences", "nats", "reward of the chosen minus of the rejected"
        ),
        "chosen_reward": Metric(
            "preferences", "nats", "beta log(policy / reference), mean over pairs"
        ),
        "rejected_reward": Metric("preferences", "nats", "the same of the rejected responses"),
    },
)
DISTILLATION = Objective(
    _from_teacher,
    report=lambda mean: (
        dict(zip(("loss", "distill_loss"), mean, strict=True)) if mean.ndim else {"loss": mean}
    ),
    metrics={
        "distill_loss": Metric("training", "nats per token", "divergence from the teacher"),
    },
)

for _objective in (PREFERENCES, DISTILLATION, MULTI_TOKEN):
    declare(_objective.metrics)


def objective_of(cfg: Config) -> Objective:
    """Return what a config minimizes."""
    if cfg.dpo.beta:
        return PREFERENCES
    if cfg.distill.teacher:
        return DISTILLATION
    return MULTI_TOKEN if cfg.model.mtp_depth else NEXT_TOKEN


def head_of(objective: Objective, h: Head) -> Callable[[Tree, jax.Array, Batch], Sums]:
    """Return an objective's head as `StagedModel` has it."""
    return functools.partial(_called, objective, h)


def _called(objective: Objective, h: Head, top: Tree, x: jax.Array, mb: Batch) -> Sums:
    return objective.head(top, x, mb, h)
