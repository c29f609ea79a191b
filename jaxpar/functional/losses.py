"""Losses of tokens: values that are called with the scores of a batch."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config, ConfigError
from jaxpar.sharding.batch import IGNORED, Batch


@dataclass(frozen=True)
class Scores:
    """What a model says of each next token.

    Every method returns float32 [B, T].
    """

    logits: jax.Array
    """float32 [B, T, V]."""
    labels: jax.Array
    """int32 [B, T]: the next token, or IGNORED (-1)."""

    def label(self) -> jax.Array:
        """Return the logit of the label; of token 0 where there is none."""
        index = jnp.maximum(self.labels, 0)[..., None]
        return jnp.take_along_axis(self.logits, index, axis=-1)[..., 0]

    def logsumexp(self) -> jax.Array:
        """Return the logarithm of the sum of the exponentials of the logits."""
        return jax.scipy.special.logsumexp(self.logits, axis=-1)

    def mean(self) -> jax.Array:
        """Return the mean of the logits over the vocabulary."""
        return jnp.mean(self.logits, axis=-1)

    def entropy(self) -> jax.Array:
        """Return the entropy of the predicted distribution, in nats."""
        scores = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(scores) * scores, axis=-1)


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss of tokens, with the terms that a model may add to it.

    A subclass defines `__call__`. It is a frozen dataclass, registered as a static pytree with
    `jax.tree_util.register_static`, so that functions of it are compiled once.
    """

    mtp_loss: float = 0.0
    """Weight of the loss of the modules of multi-token prediction."""
    balance_loss: float = 0.0
    """Weight of the loss that balances the load of experts."""
    balance_over: str = "sequence"
    """Whether loads are balanced within each `sequence`, or over the `batch`."""
    router_z_loss: float = 0.0
    """Weight of the squared logsumexp of the routers' logits."""

    def __call__(self, scores: Scores, batch: Batch) -> Any:
        """Compute the loss of each token.

        Args:     scores: of the model. batch: as passed to `loss`.
        Returns:  float32 [B, T], averaged over labeled tokens; or (values, weights), each [B, T]:
                  the loss is the sum of values times weights over the sum of weights.
        """
        raise NotImplementedError


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class NextToken(Loss):
    """Cross entropy of the next token, in nats."""

    z_loss: float = 0.0
    """Weight of the squared logsumexp of the logits."""

    def __call__(self, scores: Scores, batch: Batch) -> jax.Array:
        """Compute the loss of each token, float32 [B, T]."""
        lse = scores.logsumexp()
        return lse - scores.label() + self.z_loss * lse**2


#: A loss, or a function that is called as one.
type AnyLoss = Loss | Callable[[Scores, Batch], Any]


def loss_of(config: Config) -> NextToken:
    """Return the loss that a config trains, with the weights of its section `train`.

    Schedules of these weights are not read.

    Raises:   ConfigError for preference tuning and distillation, which need more than tokens.
    """
    for field, on in (("dpo.beta", config.dpo.beta), ("distill.teacher", config.distill.teacher)):
        if on:
            rule = "trains a loss that needs more than a batch of tokens"
            raise ConfigError(field, on, rule, "pass loss=NextToken() for its cross entropy")
    names = [f.name for f in dataclasses.fields(NextToken)]
    return NextToken(**{name: getattr(config.train, name) for name in names})


def averaged(found: Any, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sum of what a loss returned, and the sum of the weights."""
    values, weights = found if isinstance(found, tuple) else (found, 1.0)
    weights = jnp.where(labels != IGNORED, weights, 0.0)
    # Not a product: the value of a token without a label may be infinite.
    return jnp.sum(jnp.where(weights != 0, values, 0.0) * weights), jnp.sum(weights)
