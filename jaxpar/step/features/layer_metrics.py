"""Metrics of each layer, with `metrics.layers`: lists in the model's order, null where a layer has
none.

What layers compute is measured by probes, as a user's file would have them (`own_probes.py`);
gradients, weights and their changes are summed by `TrainStep.layer_squares`.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxpar.components.experts import num_experts
from jaxpar.config import Config
from jaxpar.config.metrics import Metric
from jaxpar.model import probes
from jaxpar.step.feature import Feature
from jaxpar.step.features import own_probes
from jaxpar.step.features.experts import TALLY
from jaxpar.step.features.own_probes import Probe, in_layers, measured
from jaxpar.step.progress import TrainStep


def rms(x: jax.Array) -> jax.Array:
    """Return the root mean square of each token's values."""
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1))


STREAM = Probe(name="layer_rms", point="residual", reduce="mean", value=rms)
SCORE = Probe(name="layer_max_score", point="scores", reduce="max", value=lambda scores: scores)


def probes_of(cfg: Config) -> tuple[Probe, ...]:
    """Return the probes of `metrics.layers`."""
    return {"none": (), "cheap": (STREAM,), "all": (STREAM, SCORE)}[cfg.metrics.layers]


def every_probe(cfg: Config) -> tuple[Probe, ...]:
    """Return the probes of `metrics.layers`, and those of users."""
    return (*probes_of(cfg), *own_probes.probes_of(cfg))


class LayerMetrics(Feature):
    """Records metrics of each layer."""

    name = "layer_metrics"
    turn = 60
    handles_skips = True
    by_layer = True
    metrics: ClassVar[dict[str, Metric]] = {
        "layer_rms": Metric("layers", "", "root mean square of the residual stream after a layer"),
        "layer_grad_norm": Metric("layers", "", "norm of a layer's gradient, before clipping"),
        "layer_update": Metric(
            "layers", "", "norm of a layer's update, relative to that of its weights"
        ),
        "layer_max_score": Metric("layers", "", "largest attention score of all heads", "max"),
        "layer_fullest_expert": Metric("layers", "", "largest load, relative to the mean"),
    }

    def is_on(self, cfg: Config) -> bool:
        return cfg.metrics.layers != "none"

    def probes(self, cfg: Config, requested: tuple[str, ...]) -> tuple[probes.LayerProbe, ...]:
        return in_layers(probes_of(cfg))

    @jax.named_scope("layer_metrics")
    def after_gradients(self, s: TrainStep) -> TrainStep:
        """Communication: an all-reduce of each metric, of [layers], over every axis."""
        found = measured(s, probes_of(s.cfg))
        found["layer_grad_norm"] = jnp.sqrt(s.layer_squares(s.grads))
        if TALLY.name in s.probes:
            rows = s.layer_sums(TALLY.name, absent=jnp.nan)
            rows = rows[:, : num_experts(s.cfg.model)]
            found["layer_fullest_expert"] = jnp.max(rows, axis=1) / jnp.mean(rows, axis=1)
        return s.with_metrics(**found)

    @jax.named_scope("layer_metrics")
    def after_update(self, s: TrainStep) -> TrainStep:
        """Communication: two all-reduces of [layers] over every axis."""
        changes = jax.tree.map(jnp.subtract, s.trainable, s.old)
        share = s.layer_squares(changes) / s.layer_squares(s.old)
        return s.with_metrics(layer_update=jnp.sqrt(share))


FEATURE = LayerMetrics()
