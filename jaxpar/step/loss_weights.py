"""The weights of the losses beside the cross entropy, by step."""

import jax
import jax.numpy as jnp

from jaxpar.config import Config, value_of
from jaxpar.config.lists.weight_schedules import CONSTANT, MTP_LOSS, Z_LOSS
from jaxpar.model.loss import LossWeights


def loss_weights(cfg: Config, step: jax.Array | None) -> LossWeights:
    """Return the weights after `step` steps: numbers of the config, or float32 scalars by schedule.

    Args:     step: int32 scalar. None: after no steps.
    """

    def weight(path: str) -> jax.Array | float:
        found = value_of(cfg, path)
        if not found:
            return value_of(cfg, CONSTANT[path])
        points = zip(*((point.step, point.weight) for point in found), strict=True)
        steps, weights = (jnp.array(values, jnp.float32) for values in points)
        return jnp.interp(jnp.float32(0 if step is None else step), steps, weights)

    return LossWeights(z_loss=weight(Z_LOSS), mtp_loss=weight(MTP_LOSS))
