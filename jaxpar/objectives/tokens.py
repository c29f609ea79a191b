"""Objectives of tokens: the next one, those after it, and a user's loss."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpar.config import ConfigError
from jaxpar.config.metrics import METRICS, Metric
from jaxpar.model import transformer
from jaxpar.objectives import own_loss
from jaxpar.objectives.head import Head, Sums, Tree
from jaxpar.objectives.losses import Loss
from jaxpar.objectives.objective import Objective
from jaxpar.sharding.batch import Batch


class CrossEntropy(Objective):
    """Cross entropy of the next token."""

    def head(self, top: Tree, x: jax.Array, mb: Batch, h: Head) -> Sums:
        return transformer.head(top, x, mb, cfg=h.cfg, weights=h.weights)


class MultiToken(Objective):
    """The same with that of modules of multi-token prediction; evaluations have the former."""

    evaluates = False
    metrics: ClassVar[dict[str, Metric]] = {"mtp_loss": METRICS["mtp_loss"]}

    def head(self, top: Tree, x: jax.Array, mb: Batch, h: Head) -> Sums:
        def loss_of(top: Tree, x: jax.Array, mb: Batch) -> Sums:
            return transformer.token_loss(top, x, mb.labels, h.cfg, h.weights.z_loss)

        total, losses = transformer.head_with_modules(
            top, x, mb, h.ex, h.context_of, h.weights.mtp_loss, loss_of
        )
        return total, jnp.stack(losses)

    def report(self, mean: jax.Array) -> dict[str, jax.Array]:
        if not mean.ndim:  # of an evaluation
            return {"loss": mean}
        return {"loss": mean[0], "mtp_loss": jnp.mean(mean[1:])}


class OwnLoss(Objective):
    """The mean of a loss of tokens."""

    loss: Loss

    @classmethod
    def of(cls, loss: Loss) -> "OwnLoss":
        """Return the mean of a loss. Raises:   ConfigError for a metric named as another one."""
        if there := sorted(METRICS.keys() & own_loss.metric_names(loss)):
            rule, fix = "returns a metric of this name, which is another's", f'use "{there[0]}_2"'
            raise ConfigError(f"train.loss: {type(loss).__name__}.metrics", there[0], rule, fix)
        return cls(loss=loss)

    @functools.cached_property
    def metrics(self) -> dict[str, Metric]:  # type: ignore[override]
        meaning = f"a metric of train.loss, {type(self.loss).__name__}, averaged like the loss"
        names = own_loss.metric_names(self.loss)
        return {name: Metric("training", "", meaning) for name in names}

    def head(self, top: Tree, x: jax.Array, mb: Batch, h: Head) -> Sums:
        return own_loss.head(self.loss, top, x, mb, h)

    def count(self, batch: Batch, axes: tuple[str, ...]) -> jax.Array | None:
        return own_loss.count(self.loss, batch, axes)

    def report(self, mean: Any) -> dict[str, Any]:
        return own_loss.report(self.loss, mean)

    @property
    def of_metrics(self) -> int:
        return 2 * len(self.metrics)
