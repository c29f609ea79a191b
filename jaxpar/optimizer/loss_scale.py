"""Dynamic loss scaling for float16, and updates skipped because of a non-finite loss or gradient.

Both are part of the training state (`TrainState.guard`), so a run can resume with them on any mesh.
They are a few scalars, the same on every device.

In float16, gradients are small enough to underflow and large enough to overflow. The loss is
multiplied by a power of two before the backward, and the gradients are divided by it in float32;
both are exact. An overflow halves the scale and skips the update. After
`guard.loss_scale_interval` steps without an overflow, the scale doubles.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config import Config
from jaxpar.config.rules.guard import MAX_LOSS_SCALE, scales_loss

type Guard = dict[str, Any]


def initial_guard(cfg: Config) -> Guard:
    """Return the scalars before the first step, as numpy scalars."""
    return {
        "skipped": np.int32(0),  # number of updates skipped so far
        "in_a_row": np.int32(0),  # skipped since the last update, without overflows at a scale > 1
        "loss_scale": np.float32(cfg.guard.loss_scale if scales_loss(cfg) else 1.0),
        "since_change": np.int32(0),  # number of steps since the scale changed
    }


def unscale_gradients(grads: Any, scale: jax.Array | float, *, scaled: bool) -> Any:
    """Convert gradients of the loss times `scale` to gradients of the loss.

    Args:     scaled: `Execution.scales_loss`.
    """
    return jax.tree.map(lambda g: g / scale, grads) if scaled else grads


def update_guard(cfg: Config, guard: Guard, ok: jax.Array, *, scaled: bool) -> Guard:
    """Return the scalars after a step.

    Args:     ok: bool scalar, whether the update was made. scaled: `Execution.scales_loss`.
    """
    scale, since = guard["loss_scale"], guard["since_change"]
    excused = ~ok & (scale > 1) if scaled else jnp.zeros_like(ok)
    in_a_row = jnp.where(ok, 0, guard["in_a_row"] + jnp.where(excused, 0, 1))
    if scaled:
        grows = ok & (since + 1 >= cfg.guard.loss_scale_interval)
        larger = jnp.minimum(scale * 2, MAX_LOSS_SCALE)
        scale = jnp.where(ok, jnp.where(grows, larger, scale), jnp.maximum(scale / 2, 1.0))
        since = jnp.where(grows | ~ok, 0, since + 1)
    skipped = guard["skipped"] + jnp.where(ok, 0, 1)
    new = {
        "skipped": skipped,
        "in_a_row": in_a_row,
        "loss_scale": scale,
        "since_change": since,
    }
    return {name: value.astype(guard[name].dtype) for name, value in new.items()}
