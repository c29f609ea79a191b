"""Learning-rate schedules."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.config import OptimizerConfig
from jaxpar.config.lists.step_sizes import STEPS, counted, shares_of_steps
from jaxpar.optimizer.own import Schedule

#: Share of a run that is its warm-up, if `optimizer.warmup_steps` is longer than the run.
SHORT_WARM_UP = 0.1

#: Without `optimizer.decay_steps`, wsd decays in one of this many parts after the warm-up.
WSD_PARTS = 5


def warm_up(cfg: OptimizerConfig, num_steps: int) -> int:
    """Return the steps of the warm-up of a run of `num_steps`.

    They are `warmup_fraction` of the run, or else `warmup_steps`. If the run is not longer than
    `warmup_steps`, they are SHORT_WARM_UP of it.
    """
    if cfg.warmup_fraction:
        return round(cfg.warmup_fraction * num_steps)
    if cfg.warmup_steps < num_steps:
        return cfg.warmup_steps
    return int(SHORT_WARM_UP * num_steps)


def shortened(cfg: OptimizerConfig, num_steps: int) -> str:
    """Describe a warm-up that is shorter than `warmup_steps`; empty if it is not."""
    num_steps = math.ceil(counted(cfg, num_steps))
    steps = warm_up(cfg, num_steps)
    if cfg.warmup_fraction or steps == cfg.warmup_steps:
        return ""
    return (
        f"{steps} steps, not optimizer.warmup_steps = {cfg.warmup_steps}, in a run of {num_steps}"
    )


def learning_rate(cfg: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the learning rate of each step: linear warmup, then the configured shape.

    Args:     cfg: resolved. num_steps: of the run.
    """
    if cfg.schedule_by == STEPS:
        return _by_steps(cfg, num_steps)
    by_whole_steps = _by_steps(cfg, math.ceil(counted(cfg, num_steps)))
    return lambda step: by_whole_steps(_counted_on_device(cfg, step))


def _counted_on_device(cfg: OptimizerConfig, steps: jax.typing.ArrayLike) -> jax.Array:
    """`counted`, as a float32 scalar of an int32 scalar."""
    found = shares_of_steps(cfg)
    corners = [(one.step, counted(cfg, one.step)) for one in found]
    total = jnp.float32(0)
    for (first, before), one in zip(corners, found, strict=True):
        after = before + one.share * (jnp.asarray(steps) - first).astype(jnp.float32)
        total = jnp.where(jnp.asarray(steps) >= first, after, total)
    return total


def _by_steps(cfg: OptimizerConfig, num_steps: int) -> optax.Schedule:
    peak, floor = cfg.learning_rate, cfg.learning_rate * cfg.min_lr_ratio
    first_steps = warm_up(cfg, num_steps)
    after = max(num_steps - first_steps, 1)
    decay = cfg.decay_steps or after
    last = min(cfg.decay_steps, after) or max(after // WSD_PARTS, 1)
    shapes: dict[Any, optax.Schedule] = {
        "cosine": optax.cosine_decay_schedule(peak, decay, alpha=cfg.min_lr_ratio),
        "linear": optax.linear_schedule(peak, floor, decay),
        "wsd": optax.linear_schedule(peak, floor, last, transition_begin=after - last),
        "constant": optax.constant_schedule(peak),
    }
    if isinstance(cfg.schedule, Schedule):
        own = cfg.schedule
        shapes[own] = lambda step: peak * own(step, after)
    if first_steps == 0:
        return shapes[cfg.schedule]
    # Step i of the warmup uses (i + 1) / first_steps of the peak, so step 0 is not wasted.
    # (After its end a linear schedule stays at the peak, so a warmup of one step is at the peak.)
    rising = optax.linear_schedule(peak / first_steps, peak, max(first_steps - 1, 1))
    return optax.join_schedules([rising, shapes[cfg.schedule]], [first_steps])


def on_host(schedule: optax.Schedule) -> Callable[[int], float]:
    """Return a schedule that is computed on the host's CPU.

    On a GPU, each value would wait for the steps that are already dispatched. What the schedule
    needs is compiled now. If JAX may not use the CPU (JAX_PLATFORMS=cuda), values are computed on
    the default device.
    """
    cpu = None
    with contextlib.suppress(RuntimeError):
        cpu = jax.local_devices(backend="cpu")[0]

    def value(step: int) -> float:
        with jax.default_device(cpu):
            return float(schedule(step))

    value(0)
    return value


# ----------------- The learning rates of a run as an array, which a compiled step takes as an input
#
# A schedule in the step is compiled into it. Runs that differ in their schedule then compile a
# program each, though the programs differ in a few constants. With `optimizer.schedule_as_input`,
# all of them use one program, and the rate of update i is entry i of the array.


#: The length of the array is this, or a larger power of two: runs of various lengths share it.
MIN_LENGTH = 1024


def rate_table(cfg: OptimizerConfig, num_steps: int) -> np.ndarray:
    """Return the learning rate of each update, float32 [a power of two above `num_steps`].

    Computed on the host's CPU, if JAX may use it.
    """
    length = max(MIN_LENGTH, 1 << num_steps.bit_length())
    cpu = None
    with contextlib.suppress(RuntimeError):
        cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        rates = jax.vmap(learning_rate(cfg, num_steps))(jnp.arange(length))
        return np.asarray(jnp.broadcast_to(rates, length), np.float32)


def schedule_of(rates: jax.Array) -> optax.Schedule:
    """Return the schedule of a table of rates."""
    return lambda count: rates[jnp.minimum(count, len(rates) - 1)]
