"""Update rule and learning-rate schedule: optax transformations, on each device's local shards.

Every rule here is elementwise, so it needs no communication; the one global number, the norm of
the gradient, is ours to sum (`step.py`).
"""

from typing import Any

import optax

from jaxpar import extensions
from jaxpar.config import OptimizerConfig
from jaxpar.params import decay_mask


def learning_rate(cfg: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate of each step: linear warm-up from 0, then the configured shape."""
    peak, floor = cfg.learning_rate, cfg.learning_rate * cfg.min_lr_ratio
    after = max(num_steps - cfg.warmup_steps, 1)
    stable = after - max(after // 5, 1)
    shapes = {
        "cosine": optax.cosine_decay_schedule(peak, after, alpha=cfg.min_lr_ratio),
        "linear": optax.linear_schedule(peak, floor, after),
        "wsd": optax.linear_schedule(peak, floor, after - stable, transition_begin=stable),
        "constant": optax.constant_schedule(peak),
    }
    if cfg.warmup_steps == 0:
        return shapes[cfg.schedule]
    # Step i of the warm-up runs at (i + 1) / warmup_steps of the peak: step 0 is not wasted.
    # (Past its end a linear schedule stays at the peak, so one step of warm-up is the peak too.)
    first = peak / cfg.warmup_steps
    warmup = optax.linear_schedule(first, peak, max(cfg.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, shapes[cfg.schedule]], [cfg.warmup_steps])


def make_optimizer(
    cfg: OptimizerConfig, num_steps: int, specs: Any
) -> optax.GradientTransformation:
    """The optax update rule, with decoupled weight decay on the matrices among `specs`."""
    rate, mask = learning_rate(cfg, num_steps), decay_mask(specs)
    added = extensions.function("optimizer.name", cfg.name)
    if added is not None:
        return added(cfg, rate, mask)
    if cfg.name == "lion":
        return optax.lion(
            rate, b1=cfg.beta1, b2=cfg.beta2, weight_decay=cfg.weight_decay, mask=mask
        )
    if cfg.name == "sgd":
        decay = optax.add_decayed_weights(cfg.weight_decay, mask=mask)
        return optax.chain(optax.trace(decay=cfg.beta1), decay, optax.scale_by_learning_rate(rate))
    return optax.adamw(
        rate,
        b1=cfg.beta1,
        b2=cfg.beta2,
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        mask=mask,
    )
