"""Update rules: optax transformations on each device's local shards.

Most rules are elementwise, so they need no communication. Those that need whole matrices get them
by `Matrices.map`. Gradient clipping, which needs the global norm, happens before the update
(`step/train_step.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

from jaxpar.config import ConfigError, OptimizerConfig
from jaxpar.optimizer.adafactor import adafactor
from jaxpar.optimizer.matrices import Matrices
from jaxpar.optimizer.muon import muon
from jaxpar.optimizer.own import UpdateRule
from jaxpar.optimizer.schedules import learning_rate, schedule_of
from jaxpar.optimizer.widths import of_widths, scale_by_adam
from jaxpar.sharding.params import decay_mask

type Transformation = optax.GradientTransformation


@dataclass(frozen=True)
class Rule:
    """An update rule, and what it has to see of the parameters.

    make     (cfg, rate, mask) -> the optax transformation. Unless it is elementwise, it also takes
             `Matrices`.
    needs    "elements": it may be given any shards. "widths": the same, and it reads the widths of
             the parameters. "sums": it sums over dims of all shards. "matrices": it needs whole
             matrices.
    """

    make: Callable[..., Transformation]
    needs: Literal["elements", "widths", "sums", "matrices"] = "elements"

    def transformation(
        self, cfg: OptimizerConfig, rate: optax.Schedule, specs: Any, *, sharded: bool
    ) -> Transformation:
        """Return the optax transformation for parameters with these specs."""
        mask = decay_mask(specs)
        if self.needs == "elements":
            return self.make(cfg, rate, mask)
        return self.make(cfg, rate, mask, Matrices(specs, sharded))


def rule_of(name: Any) -> Rule:
    """Return the rule of `optimizer.name`: that of a name, or a user's value.

    Raises:   ConfigError when the rule is made, for a result that is no transformation.
    """
    if not isinstance(name, UpdateRule):
        return RULES[name]

    def make(*args: Any) -> Transformation:
        made = name(*args)
        if not all(callable(getattr(made, part, None)) for part in ("init", "update")):
            rule = f"returns {type(made).__name__} instead of an optax.GradientTransformation"
            raise ConfigError("optimizer.name", type(name).__name__, rule, "return that")
        return made

    return Rule(make, name.needs)


def make_optimizer(
    cfg: OptimizerConfig,
    num_steps: int,
    specs: Any,
    *,
    sharded: bool = False,
    rates: jax.Array | None = None,
) -> Transformation:
    """Return the optax update rule, with decoupled weight decay on the matrices in `specs`.

    Args:     sharded: whether the arrays of an update are a device's shards, inside the step's
              `shard_map`. If not, they are complete. rates: from `rate_table`; None: the schedule
              is a part of the program.
    """
    rate = learning_rate(cfg, num_steps) if rates is None else schedule_of(rates)
    return rule_of(cfg.name).transformation(cfg, rate, specs, sharded=sharded)


def adamw(
    cfg: OptimizerConfig, rate: optax.Schedule, mask: Any, matrices: Matrices
) -> Transformation:
    """Return AdamW."""
    specs = matrices.specs
    return _decayed(cfg, of_widths(scale_by_adam(cfg, specs), specs), rate, mask)


def lion(
    cfg: OptimizerConfig, rate: optax.Schedule, mask: Any, matrices: Matrices
) -> Transformation:
    """Return Lion."""
    direction = optax.scale_by_lion(cfg.beta1, cfg.beta2)
    return _decayed(cfg, of_widths(direction, matrices.specs), rate, mask)


def _decayed(
    cfg: OptimizerConfig, direction: Transformation, rate: optax.Schedule, mask: Any
) -> Transformation:
    decay = optax.add_decayed_weights(cfg.weight_decay, mask=mask)
    return optax.chain(direction, decay, optax.scale_by_learning_rate(rate))


def sgd(cfg: OptimizerConfig, rate: optax.Schedule, mask: Any) -> Transformation:
    """Return stochastic gradient descent with momentum. The arguments are those of added rules."""
    return _decayed(cfg, optax.trace(decay=cfg.beta1), rate, mask)


#: The built-in values of `optimizer.name`.
RULES = {
    "adamw": Rule(adamw, needs="widths"),
    "lion": Rule(lion, needs="widths"),
    "sgd": Rule(sgd),
    "muon": Rule(muon, needs="matrices"),
    "adafactor": Rule(adafactor, needs="sums"),
}
