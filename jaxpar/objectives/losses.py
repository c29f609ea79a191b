"""Losses of tokens: values that are called with the scores of a batch.

The same value is the loss of the plain model (`jaxpar.functional.loss`) and of a run
(`train.loss`), which derives sums, pipeline stages, accumulation, evaluation and sharding.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpar.config import Config, ConfigError, flag, value_of
from jaxpar.config.fields import switch_of
from jaxpar.config.schema.features import objective_in
from jaxpar.config.values import Value, fields_of
from jaxpar.sharding.batch import IGNORED, Batch


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a model says of each next token.

    Every method returns float32 [B, T], and can be differentiated. In a run the vocabulary is
    sharded and logits are never gathered: there, only the methods can be used.
    """

    logits: jax.Array
    """float32 [B, T, V], of the plain model."""
    labels: jax.Array
    """int32 [B, T]: the next token, or IGNORED (-1)."""

    def label(self) -> jax.Array:
        """Return the logit of the label; any number where there is none."""
        index = jnp.maximum(self.labels, 0)[..., None]
        return jnp.take_along_axis(self.logits, index, axis=-1)[..., 0]

    def logsumexp(self) -> jax.Array:
        """Return the logarithm of the sum of the exponentials of the logits."""
        return jax.scipy.special.logsumexp(self.logits, axis=-1)

    def log_prob(self) -> jax.Array:
        """Return the logarithm of the label's probability."""
        return self.label() - self.logsumexp()

    def mean(self) -> jax.Array:
        """Return the mean of the logits over the vocabulary."""
        return jnp.mean(self.logits, axis=-1)

    def entropy(self) -> jax.Array:
        """Return the entropy of the predicted distribution, in nats."""
        scores = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(scores) * scores, axis=-1)


class Loss(Value):
    """A loss of tokens, with the terms that a model may add to it.

    A subclass defines `__call__`, and its fields as annotations: it is a frozen dataclass and a
    static pytree, so functions that take it are compiled once for each value. In a run, the terms
    below are fields of the config's section `train`.
    """

    kind: ClassVar[str] = "Loss"

    mtp_loss: float = 0.0
    """Weight of the loss of the modules of multi-token prediction."""
    balance_loss: float = 0.0
    """Weight of the loss that balances the load of experts."""
    balance_over: str = "sequence"
    """Whether loads are balanced within each `sequence`, or over the `batch`."""
    router_z_loss: float = 0.0
    """Weight of the squared logsumexp of the routers' logits."""

    def __new__(cls, *args: Any, **fields: Any) -> Any:
        kind: Any = cls
        _make_static(kind)
        return super().__new__(cls, *args, **fields)

    def check(self, cfg: Config, path: str) -> None:
        name = type(self).__name__
        for term in TERMS:
            if getattr(self, term) != getattr(Loss, term):
                rule, fix = f"is train.{term} in a run", f"use {flag(f'train.{term}')}"
                raise ConfigError(f"{path}: {name}.{term}", getattr(self, term), rule, fix)

    def __call__(self, scores: Scores, batch: Batch) -> Any:
        """Compute the loss of each token.

        Args:     scores: of the model. batch: as passed to `loss`; in a run, `tokens`, `labels`,
                  `positions`, `segment_ids` of this device's tokens, and what `reads` names.
        Returns:  float32 [B, T], averaged over labeled tokens; or (values, weights), each [B, T]:
                  the loss is the sum of values times weights over the sum of weights of the global
                  batch. A token's value and weight may depend on that token alone, and on its row
                  where the mesh does not split sequences. Gradients of weights that depend on the
                  scores count; a step then begins with a forward of its batch, for their sum.
        """
        raise NotImplementedError

    def plain(self, scores: Scores, batch: Batch) -> Any:
        """Compute the same from all logits on one device, for `certify`; here by the same code.

        Args, Returns:  as `__call__`; `scores.logits` is float32 [B, T, V].
        """
        return self(scores, batch)

    def metrics(self, values: jax.Array, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Return metrics of the step: name -> (values, weights), averaged like the loss.

        Args:     values: float32 [B, T], what the loss returned, without weights.
        """
        return {}


@functools.cache
def _make_static(cls: type) -> None:
    """Register a class as a static pytree. Not when it is made, since a decorator may do so."""
    with contextlib.suppress(ValueError):
        jax.tree_util.register_static(cls)


#: The fields of `Loss` itself.
TERMS = tuple(field.name for field in fields_of(Loss))


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


def loss_of(config: Config) -> Loss:
    """Return the loss that a config trains, with the weights of its section `train`.

    Schedules of these weights are not read.

    Raises:   ConfigError for other objectives, which need more than tokens.
    """
    if (of := objective_in(config)) is not None:
        field, rule = "train.loss", "trains a loss that needs more than a batch of tokens"
        field = switch_of(of.section) if of.section else field
        fix = "pass loss=NextToken() for its cross entropy"
        raise ConfigError(field, value_of(config, field), rule, fix)
    terms = {name: getattr(config.train, name) for name in TERMS}
    if config.train.loss is None:
        return NextToken(z_loss=config.train.z_loss, **terms)
    assert isinstance(config.train.loss, Loss)
    return dataclasses.replace(config.train.loss, **terms)


def split(found: Any, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the values and the weights of what a loss returned; weights are 0 without a label.

    Raises:   ConfigError for other shapes than those of `labels`.
    """
    values, weights = found if isinstance(found, tuple) else (found, jnp.float32(1))
    values, weights = _in_full(values), _in_full(weights)
    if values.shape != labels.shape or weights.shape not in (labels.shape, ()):
        told = f"values {list(values.shape)} and weights {list(weights.shape)}"
        rule = f"must return values, or (values, weights), like the labels, {list(labels.shape)}"
        raise ConfigError("loss", told, rule, "return the loss of each token, not a mean")
    return values, jnp.where(labels != IGNORED, weights, 0.0)


def _in_full(a: Any) -> jax.Array:
    """Return an array in float32, or float64 where the plain model runs in that."""
    return jnp.asarray(a, jnp.promote_types(jnp.result_type(a), jnp.float32))


def summed(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sum of values times weights, and the sum of weights."""
    # Not a product: the value of a token without a label may be infinite.
    return jnp.sum(jnp.where(weights != 0, values, 0.0) * weights), jnp.sum(weights)
