"""Learning-rate schedules."""

import optax

from jaxpar.config import OptimizerConfig


def learning_rate(cfg: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the learning rate of each step: linear warmup, then the configured shape."""
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
    # Step i of the warmup uses (i + 1) / warmup_steps of the peak, so step 0 is not wasted.
    # (After its end a linear schedule stays at the peak, so a warmup of one step is at the peak.)
    first = peak / cfg.warmup_steps
    warmup = optax.linear_schedule(first, peak, max(cfg.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, shapes[cfg.schedule]], [cfg.warmup_steps])
