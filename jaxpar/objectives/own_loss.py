"""A loss of tokens (`losses.py`) as the objective of a step, on local shards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax

from jaxpar.model import transformer
from jaxpar.model.transformer import before_logits
from jaxpar.objectives import token_scores
from jaxpar.objectives.head import Head, Sums, Tree
from jaxpar.objectives.losses import Loss, Scores, split, summed
from jaxpar.parallel.collectives import broadcast_from_last_stage, psum
from jaxpar.sharding.batch import Batch


class _Scores(Scores):
    """Scores that a function returns by name, without logits."""

    _of: Callable[[str], jax.Array]

    def __init__(self, of: Callable[[str], jax.Array]):
        object.__setattr__(self, "_of", of)

    def label(self) -> jax.Array:
        return self._of(token_scores.LABEL)

    def logsumexp(self) -> jax.Array:
        return self._of(token_scores.LOGSUMEXP)

    def mean(self) -> jax.Array:
        return self._of(token_scores.MEAN)

    def entropy(self) -> jax.Array:
        return self._of(token_scores.ENTROPY)


def _wanted(loss: Loss, batch: Batch) -> tuple[str, ...]:
    """Return the names of the scores that a loss reads of a batch."""
    names = dict[str, None]()

    def record(name: str) -> jax.Array:
        names[name] = None
        return jnp.zeros(batch.labels.shape, jnp.float32)

    jax.eval_shape(lambda batch: loss(_Scores(record), batch), batch)
    return tuple(sorted(names))


@jax.named_scope("loss")
def head(loss: Loss, top: Tree, x: jax.Array, mb: Batch, h: Head) -> Sums:
    """Compute the weighted sum of a microbatch's loss from the last stage's residual stream.

    With weights that depend on the scores, the gradient is that of sum(values weights) /
    sum(weights): of the sum minus the mean, a constant, times the sum of weights.

    Args:     x: [B, T/(sequence*tensor), D], read on the last pipeline stage.
    Returns:  (loss with that of modules of multi-token prediction; float32 [1 + depth + 2 metrics]:
              the loss, that of each module, and the sums of values and of weights of each metric;
              in an evaluation, if weights depend on the scores, also their sum).
    Communication: a broadcast over PIPELINE; that of `token_scores.of_hidden`; that of modules.
    """
    wanted, weighs = _wanted(loss, mb), _weighs_scores(loss, mb)

    def loss_of(top: Tree, x: jax.Array, of: Batch) -> Sums:
        scores = token_scores.of_hidden(top, x, of.labels, h.cfg, wanted)
        values, weights = split(loss(_Scores(scores.__getitem__), of), of.labels)
        if of is not mb:  # a module's weights are constants
            weights = lax.stop_gradient(weights)
        total, count = summed(values, weights)
        metrics = loss.metrics(lax.stop_gradient(values), of)
        pairs = [split(metrics[name], of.labels) for name in sorted(metrics)]
        sums = [total, *(part for pair in pairs for part in summed(*pair))]
        if weighs and not h.trains:
            sums.append(count)
        if h.mean is not None and of is mb:
            total -= h.mean * count
        return total, lax.stop_gradient(jnp.stack(sums))

    if not (h.cfg.model.mtp_depth and h.trains):
        x = broadcast_from_last_stage(before_logits(top, x, h.cfg.model))
        return loss_of(top, x, mb)
    total, (own, *modules) = transformer.head_with_modules(
        top, x, mb, h.ex, h.context_of, h.weights.mtp_loss, loss_of
    )
    of_modules = jnp.stack([reported[0] for reported in modules])
    return total, jnp.concatenate([own[:1], of_modules, own[1:]])


def count(loss: Loss, batch: Batch, axes: tuple[str, ...]) -> jax.Array | None:
    """Return the sum of the weights over the tokens of the global batch, float32; None if weights
    depend on the model's scores.

    Communication: a scalar all-reduce over `axes`.
    """
    if _weighs_scores(loss, batch):
        return None
    return psum(_weights(loss, batch)(_zeros(loss, batch)), axes)


def _weights(loss: Loss, batch: Batch) -> Callable[[dict[str, jax.Array]], jax.Array]:
    """Return the function from scores of a batch to the sum of their weights."""
    return lambda scores: jnp.sum(split(loss(_Scores(scores.__getitem__), batch), batch.labels)[1])


def _zeros(loss: Loss, batch: Batch) -> dict[str, jax.Array]:
    return dict.fromkeys(_wanted(loss, batch), jnp.zeros(batch.labels.shape, jnp.float32))


def _weighs_scores(loss: Loss, batch: Batch) -> bool:
    """Return whether a loss's weights of tokens depend on the model's scores."""
    return _reads_input(jax.make_jaxpr(_weights(loss, batch))(_zeros(loss, batch)).jaxpr)


def _reads_input(jaxpr: Any) -> bool:
    """Return whether the outputs of a traced function depend on its arguments."""
    live = {v for v in jaxpr.outvars if isinstance(v, jax.extend.core.Var)}
    for eqn in reversed(jaxpr.eqns):
        if not live.isdisjoint(eqn.outvars):
            live |= {v for v in eqn.invars if isinstance(v, jax.extend.core.Var)}
    return not live.isdisjoint(jaxpr.invars)


def metric_names(loss: Loss) -> list[str]:
    """Return the names of a loss's metrics."""
    some = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    batch = Batch(some, some, some, some, extra=dict.fromkeys(loss.reads, some))
    values = jax.ShapeDtypeStruct(some.shape, jnp.float32)
    return sorted(jax.eval_shape(loss.metrics, values, batch))


def report(loss: Loss, mean: Any) -> dict[str, Any]:
    """Name the means of a step's sums.

    Args:     mean: what `head` reports, summed and divided.
    """
    names = metric_names(loss)
    modules, of_metrics = mean[1 : len(mean) - 2 * len(names)], mean[len(mean) - 2 * len(names) :]
    found = {"loss": mean[0]} | ({"mtp_loss": modules.mean()} if len(modules) else {})
    return found | {name: of_metrics[2 * i] / of_metrics[2 * i + 1] for i, name in enumerate(names)}
