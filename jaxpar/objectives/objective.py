"""What a step minimizes, as a value: a head, what its sums are means over, and their names.

The head of the model gives sums; a step divides them by a count, of the whole batch.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config, ConfigError
from jaxpar.config.metrics import METRICS, Metric, declare
from jaxpar.config.values import unknown_code
from jaxpar.model import transformer
from jaxpar.objectives.head import Head, Sums, Tree, count_labels
from jaxpar.objectives.losses import Loss
from jaxpar.parallel.collectives import psum
from jaxpar.sharding.axes import REPLICA
from jaxpar.sharding.batch import Batch


def _loss(mean: jax.Array) -> dict[str, jax.Array]:
    return {"loss": mean}


@dataclass(frozen=True)
class Objective:
    """What a step minimizes."""

    head: Callable[[Tree, jax.Array, Batch, Head], Sums]
    """(weights outside layers, x, microbatch, Head) -> (sum to differentiate, sums to report).
    Every device calls it; x is that of the last pipeline stage."""
    count: Callable[[Batch, tuple[str, ...]], jax.Array | None] = count_labels
    """(batch of this device, mesh axes) -> what the sums are divided by, of the global batch. None:
    it depends on the model, and is the last of the sums in an evaluation; a training step evaluates
    its batch first, and the head gets the mean."""
    report: Callable[[Any], dict[str, Any]] = _loss
    """Means of the sums -> metrics, among them "loss"."""
    metrics: dict[str, Metric] = field(default_factory=dict, hash=False, compare=False)
    """The metrics that it adds."""
    of_metrics: int = 0
    """How many of the sums, the last ones, are those of metrics: over all replicas of DiLoCo."""

    def summed(self, sums: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Sum what heads have reported over devices, and metrics over all replicas.

        Communication: an all-reduce over `axes`, and one of metrics over REPLICA if it is another.
        """
        total, n = psum(sums, axes), self.of_metrics
        if not n or REPLICA in axes:
            return total
        return jnp.concatenate([total[:-n], psum(total[-n:], REPLICA)])


def _next_token(top: Tree, x: jax.Array, mb: Batch, h: Head) -> Sums:
    return transformer.head(top, x, mb, cfg=h.cfg, weights=h.weights)


def _with_modules(top: Tree, x: jax.Array, mb: Batch, h: Head) -> Sums:
    if not h.trains:
        return _next_token(top, x, mb, h)

    def loss_of(top: Tree, x: jax.Array, mb: Batch) -> Sums:
        return transformer.token_loss(top, x, mb.labels, h.cfg, h.weights.z_loss)

    total, losses = transformer.head_with_modules(
        top, x, mb, h.ex, h.context_of, h.weights.mtp_loss, loss_of
    )
    return total, jnp.stack(losses)


def _of_pairs(top: Tree, x: jax.Array, mb: Batch, h: Head) -> Sums:
    from jaxpar.objectives import pairs

    if h.max_segments is None:
        raise ValueError("pairs need max_segments")
    return pairs.head(top, x, mb, cfg=h.cfg, max_pairs=h.max_segments // 2)


def _from_teacher(top: Tree, x: jax.Array, mb: Batch, h: Head) -> Sums:
    if not h.trains:
        return _next_token(top, x, mb, h)
    from jaxpar.objectives import distillation

    return distillation.head(top, x, mb, cfg=h.cfg)


def _count_pairs(batch: Batch, axes: tuple[str, ...]) -> jax.Array:
    from jaxpar.objectives import pairs

    return psum(pairs.count_pairs(batch), axes).astype(jnp.float32)


def _report_pairs(mean: jax.Array) -> dict[str, jax.Array]:
    from jaxpar.objectives.pairs import MEASURES

    return dict(zip(MEASURES, mean, strict=True))


def of_loss(loss: Loss) -> Objective:
    """Return the objective that is the mean of a loss of tokens."""
    from jaxpar.objectives import own_loss

    meaning = f"a metric of train.loss, {type(loss).__name__}, averaged like the loss"
    names = own_loss.metric_names(loss)
    if there := sorted(METRICS.keys() & names):
        rule, fix = "returns a metric of this name, which is another's", f'use "{there[0]}_2"'
        raise ConfigError(f"train.loss: {type(loss).__name__}.metrics", there[0], rule, fix)
    metrics = {name: Metric("training", "", meaning) for name in names}
    head = functools.partial(own_loss.head, loss)
    count = functools.partial(own_loss.count, loss)
    report = functools.partial(own_loss.report, loss)
    return Objective(head, count, report, metrics, 2 * len(names))


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
    report=_report_pairs,
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


def declare_metrics() -> None:
    """Declare the metrics of objectives, which come after those of features."""
    for objective in (PREFERENCES, DISTILLATION, MULTI_TOKEN):
        declare(objective.metrics)


declare_metrics()


def objective_of(cfg: Config) -> Objective:
    """Return what a config minimizes."""
    if isinstance(cfg.train.loss, Loss):
        return of_loss(cfg.train.loss)
    if cfg.train.loss is not None:
        raise unknown_code("train.loss", cfg.train.loss)
    if cfg.dpo:
        return PREFERENCES
    if cfg.distill:
        return DISTILLATION
    return MULTI_TOKEN if cfg.model.mtp_depth else NEXT_TOKEN


def head_of(objective: Objective, h: Head) -> Callable[[Tree, jax.Array, Batch], Sums]:
    """Return an objective's head as `StagedModel` has it."""
    return functools.partial(_called, objective, h)


def _called(objective: Objective, h: Head, top: Tree, x: jax.Array, mb: Batch) -> Sums:
    return objective.head(top, x, mb, h)
