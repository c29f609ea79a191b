"""Skips updates whose loss or gradients are not finite, and scales the loss in float16."""

from typing import Any

import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.optimizer import loss_scale
from jaxpar.sharding.params import ParamSpec
from jaxpar.step.feature import Feature
from jaxpar.step.progress import TrainStep


class Guard(Feature):
    """Counts skipped updates; with float16, the scale of the loss."""

    name = "guard"
    turn = 80
    handles_skips = True

    def is_on(self, cfg: Config) -> bool:
        return True

    def extra(self, cfg: Config, specs: Any) -> Any:
        scalar = lambda a: ParamSpec(shape=(), axes=(), init="zeros", dtype=str(a.dtype))  # noqa: E731
        return {name: scalar(a) for name, a in loss_scale.initial_guard(cfg).items()}

    def initial(self, cfg: Config, params: Any) -> Any:
        return {n: jnp.asarray(a) for n, a in loss_scale.initial_guard(cfg).items()}

    def before_gradients(self, s: TrainStep) -> TrainStep:
        return s.replace(scale=s.extra["guard"]["loss_scale"]) if "guard" in s.extra else s

    def after_update(self, s: TrainStep) -> TrainStep:
        guard = loss_scale.update_guard(s.cfg, s.extra["guard"], s.ok, scaled=s.ex.scales_loss)
        counts = {name: guard[name].astype(jnp.float32) for name in ("skipped", "in_a_row")}
        return s.with_extra(guard=guard).with_metrics(loss_scale=s.scale, **counts)


FEATURE = Guard()
