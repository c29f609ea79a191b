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
    for feature in features_of(cfg):
        found |= feature.plain_before(params, batch, cfg)
    return found


def after_update(new: Any, cfg: Config) -> Metrics:
    """Return the metrics of a step's update.

    Args:     new: all parameters after it.
    """
    zero = jnp.zeros(())
    found: Metrics = {"skipped": zero, "in_a_row": zero, "loss_scale": jnp.ones(())}
    for feature in features_of(cfg):
        found |= feature.plain_after(new, cfg)
    return found
