"""Update rules: optax transformations on each device's local shards.

Every rule here is elementwise, so it needs no communication. Gradient clipping, which needs the
global norm, happens before the update (`step/train_step.py`).
"""

from typing import Any

import optax

from jaxpar.config import OptimizerConfig, registry
from jaxpar.optimizer.schedules import learning_rate
from jaxpar.sharding.params import decay_mask


def make_optimizer(
    cfg: OptimizerConfig, num_steps: int, specs: Any
) -> optax.GradientTransformation:
    """Return the optax update rule, with decoupled weight decay on the matrices in `specs`."""
    rate, mask = learning_rate(cfg, num_steps), decay_mask(specs)
    added = registry.function("optimizer.name", cfg.name)
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
