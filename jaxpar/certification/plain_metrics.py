"""The metrics of a step, computed with the plain model on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.config import Config
from jaxpar.sharding.batch import IGNORED, Batch
from jaxpar.step.features import features_of

type Metrics = dict[str, jax.Array]


def before_update(params: Any, grads: Any, batch: Batch, cfg: Config) -> Metrics:
    """Return the metrics of a step's loss and gradients.

    Args:     params: before the update. grads: of the trainable ones.
    """
    found: Metrics = {
        "grad_norm": optax.tree.norm(grads),
        "num_tokens": jnp.sum(jnp.asarray(batch.labels) != IGNORED),
    }
    if cfg.metrics.layers != "none":
        found["layer_grad_norm"] = jnp.sqrt(_of_layers(grads, cfg))
    for feature in features_of(cfg):
        found |= feature.plain_before(params, batch, cfg)
    return found


def _of_layers(tree: Any, cfg: Config) -> jax.Array:
    """Return the sum of squares of each layer, [layers]."""
    squares = lambda stack, i: [jnp.sum(a[i] ** 2) for a in tree.get(stack, {}).values()]  # noqa: E731
    return jnp.stack([jnp.asarray(sum(squares(*place))) for place in cfg.model.places])


def of_update(new: Any, old: Any, cfg: Config) -> Metrics:
    """Return the metrics of what an update changed.

    Args:     new, old: the trainable parameters after and before it.
    """
    if cfg.metrics.layers == "none":
        return {}
    # As stored: the rounding of large weights is a part of a small change.
    stored = lambda a: a.astype(jnp.float32).astype(a.dtype)  # noqa: E731
    changes = jax.tree.map(lambda a, b: stored(a) - stored(b), new, old)
    return {"layer_update": jnp.sqrt(_of_layers(changes, cfg) / _of_layers(old, cfg))}


def after_update(new: Any, cfg: Config) -> Metrics:
    """Return the metrics of a step's update.

    Args:     new: all parameters after it.
    """
    zero = jnp.zeros(())
    found: Metrics = {"skipped": zero, "in_a_row": zero, "loss_scale": jnp.ones(())}
    for feature in features_of(cfg):
        found |= feature.plain_after(new, cfg)
    return found
