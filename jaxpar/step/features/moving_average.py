"""The moving average of the weights, kept in the state (`optimizer/moving_average.py`)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.optimizer import moving_average
from jaxpar.sharding.params import map_specs
from jaxpar.step.conversions import convert_dtype
from jaxpar.step.feature import Feature, TrainStep


class MovingAverage(Feature):
    """The average of all updates' weights, which evaluations may use."""

    name = "ema"
    turn = 20
    handles_skips = True
    of_final_weights = True

    def is_on(self, cfg: Config) -> bool:
        return moving_average.is_on(cfg)

    def extra(self, cfg: Config, specs: Any) -> Any:
        return map_specs(lambda s: dataclasses.replace(s, dtype=cfg.optimizer.ema_dtype), specs)

    def initial(self, cfg: Config, params: Any) -> Any:
        dtype = jnp.dtype(cfg.optimizer.ema_dtype)
        return jax.tree.map(lambda x: convert_dtype(x.sharding, dtype)(x), params)

    def after_update(self, s: TrainStep) -> TrainStep:
        new = moving_average.update(
            s.cfg, s.specs, s.extra["ema"], s.trainable, s.step, s.layers, s.ok
        )
        return s.with_extra(ema=new)


FEATURE = MovingAverage()
