"""Metrics of what layers compute: `Probe`, a user's function at a point of every layer."""

import json
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.experts import experts_in
from jaxpar.config import Config, ConfigError
from jaxpar.config.metrics import METRICS, Metric, Reduction
from jaxpar.config.values import Value
from jaxpar.model import probes
from jaxpar.model.largest_scores import across, largest
from jaxpar.sharding.axes import TOKEN_AXES
from jaxpar.sharding.batch import Batch
from jaxpar.step.feature import Feature
from jaxpar.step.progress import TrainStep


class Probe(Value):
    """A metric of every layer: a function of a value in the layer, reduced over all tokens.

    A subclass defines `__call__`; or pass a function as `value`. The metric is a list with a number
    for each layer, in the model's order; null for a layer without the point. At the point "head",
    it is one number. Points:

        residual              [B, T, D]  the residual stream after the layer
        mixer_input           [B, T, D]  the normalized input of attention or of a recurrence
        mixer_output          [B, T, D]  what it adds to the residual stream
        feed_forward_input    [B, T, D]  the same of the feed-forward or the experts
        feed_forward_output   [B, T, D]
        router                [B, T, E]  probabilities of the experts, float32
        scores                [B, H]     largest attention score of each head, float32; reduce "max"
        head                  [B, T, D]  the head's input: the last stream, normalized
    """

    kind: ClassVar[str] = "Probe"

    name: str = ""
    """Of the metric. Empty: that of the class."""
    point: str = "residual"
    reduce: Reduction | Literal[""] = ""
    """How tokens are reduced, on all devices: "mean", "sum" or "max". It must be said."""
    value: Callable[[jax.Array], jax.Array] | None = None
    """The function, in place of `__call__`."""

    def check(self, cfg: Config, path: str) -> None:
        if self.point not in POINTS:
            rule, fix = "is no point of a layer", f"use one of {', '.join(POINTS)}"
            raise ConfigError(f"{path}: {self.metric}.point", self.point, rule, fix)
        reductions = ("max",) if self.point == "scores" else ("mean", "sum", "max")
        if self.reduce not in reductions:
            rule = f"must say how tokens are reduced at {self.point}"
            fix = f"use reduce={' or '.join(map(json.dumps, reductions))}"
            raise ConfigError(f"{path}: {self.metric}.reduce", self.reduce, rule, fix)
        if self.point == "router" and not experts_in(cfg.model):
            rule, fix = "needs a model with experts", 'use point="feed_forward_input"'
            raise ConfigError(f"{path}: {self.metric}.point", self.point, rule, fix)
        has_method = type(self).__call__ is not Probe.__call__
        if (self.value is None) != has_method:
            rule = "needs one function, and has " + ("two" if has_method else "none")
            fix = "leave out value" if has_method else "use value=FUNCTION"
            raise ConfigError(f"{path}: {self.metric}.value", self.value, rule, fix)
        names = [probe.metric for probe in probes_of(cfg)]
        if names.count(self.metric) > 1 or self.metric in METRICS:
            rule, fix = "is the name of another metric", f'use name="{self.metric}_2"'
            raise ConfigError(f"{path}: {type(self).__name__}.name", self.metric, rule, fix)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute a number for each token.

        Args:     x: the value at the point: some of the tokens, each of them whole, in the dtype in
                  which the layer has it.
        Returns:  [B, T], or [B, ...] at the point "scores".
        """
        assert self.value is not None
        return self.value(x)

    @property
    def metric(self) -> str:
        """The name of the metric."""
        return self.name or type(self).__name__


#: The points of `Probe`, by the points of layers.
POINTS = {
    "residual": "layer",
    "router": "routing",
    "scores": "queries",
    "head": probes.HEAD,
    **{name: name for name in probes.OF_LAYER if name != "layer"},
}


def _at(probe: Probe, seen: probes.Seen) -> jax.Array:
    """Return the value at a probe's point."""
    if probe.point == "router":
        return lax.stop_gradient(seen.more["routing"].probabilities)
    if probe.point == "scores":
        queries = lax.stop_gradient(seen.x), lax.stop_gradient(seen.more["k"])
        return largest(*across(*queries, seen.context.mask))
    return seen.x


def _of_tokens(probe: Probe, x: jax.Array) -> jax.Array:
    """Return what a probe computes, float32. Raises:   ConfigError for another shape."""
    found = jnp.asarray(probe(x), jnp.float32)
    wanted = x.shape[:1] if probe.point == "scores" else x.shape[:2]
    if found.shape[: len(wanted)] != wanted or (probe.point != "scores" and found.ndim != 2):
        rule = f"must return a number for each token, {list(wanted)}, of {list(x.shape)}"
        fix = "reduce the last axis alone, as jnp.mean(x, axis=-1) does"
        raise ConfigError("train.probes", f"{probe.metric}: {list(found.shape)}", rule, fix)
    return found


def _in_layers(probe: Probe) -> probes.LayerProbe:
    """Return what a layer measures for a user's probe."""

    def value(seen: probes.Seen) -> jax.Array:
        found = _of_tokens(probe, _at(probe, seen))
        if probe.reduce == "max":
            return jnp.max(found.reshape(len(found), -1), axis=1)
        return jnp.sum(found)

    shape = _rows if probe.reduce == "max" else _one
    return probes.LayerProbe(
        probe.metric, POINTS[probe.point], value, shape, by_row=probe.reduce == "max"
    )


def _rows(batch: Batch, _: Config) -> tuple[int, ...]:
    return (len(batch.tokens),)


def _one(_: Batch, __: Config) -> tuple[int, ...]:
    return ()


class OwnProbes(Feature):
    """The probes of `train.probes`."""

    name = "probes"
    turn = 70
    handles_skips = True
    by_layer = True

    def is_on(self, cfg: Config) -> bool:
        return bool(cfg.train.probes)

    def own_metrics(self, cfg: Config) -> dict[str, Metric]:
        return {probe.metric: _described(probe) for probe in probes_of(cfg)}

    def probes(self, cfg: Config, requested: tuple[str, ...]) -> tuple[probes.LayerProbe, ...]:
        return in_layers(probes_of(cfg))

    def after_gradients(self, s: TrainStep) -> TrainStep:
        """Communication: an all-reduce of a number for each layer and probe over every axis."""
        return s.with_metrics(**measured(s, probes_of(s.cfg)))


def _described(probe: Probe) -> Metric:
    of_layers = probe.point != "head"
    meaning = f"{probe.reduce} over tokens at {probe.point}" + of_layers * ", of each layer"
    over: Reduction = "max" if probe.reduce == "max" else "mean"  # it is of all replicas already
    return Metric("layers" if of_layers else "training", "", meaning, over)


def in_layers(some: tuple[Probe, ...]) -> tuple[probes.LayerProbe, ...]:
    """Return what layers measure for probes."""
    return tuple(map(_in_layers, some))


def measured(s: TrainStep, some: tuple[Probe, ...]) -> dict[str, jax.Array]:
    """Return the metrics of probes, float32 [layers] each, or [] at the point "head".

    Communication: an all-reduce of each.
    """
    tokens = s.batch.tokens.size * lax.axis_size(TOKEN_AXES)
    found = {}
    for probe in some:
        of_layers = s.layer_maxima if probe.reduce == "max" else s.layer_sums
        if probe.point == "head":
            value = s.at_head(probe.metric, probe.reduce or "mean")
        elif probe.metric in s.probes:
            value = of_layers(probe.metric, absent=jnp.nan)
        else:  # no layer has the point
            value = jnp.full(s.cfg.model.num_layers, jnp.nan, jnp.float32)
        found[probe.metric] = value / tokens if probe.reduce == "mean" else value
    return found


def probes_of(cfg: Config) -> tuple[Probe, ...]:
    """Return the probes of a config, without those whose code is not loaded."""
    return tuple(value for value in cfg.train.probes if isinstance(value, Probe))


def plain(params: Any, batch: Batch, cfg: Config, some: tuple[Probe, ...]) -> dict[str, jax.Array]:
    """Compute the metrics of some probes with the plain model, as `measured` returns them."""
    found: dict[str, list[jax.Array]] = {probe.metric: [] for probe in some}
    reached: dict[str, jax.Array] = {}

    def watch(point: str, value: jax.Array) -> None:
        reached[point] = value
        if point not in ("layer", probes.HEAD):
            return
        for probe in some:
            if (probe.point == "head") == (point == probes.HEAD):
                found[probe.metric].append(_reduced(probe, reached))
        reached.clear()

    from jaxpar.model.plain import decoder

    decoder.hidden_and_routings(decoder.scale_adapters(params, cfg), batch, cfg, watch)
    at_head = {probe.metric for probe in some if probe.point == "head"}
    return {n: values[0] if n in at_head else jnp.stack(values) for n, values in found.items()}


def _reduced(probe: Probe, reached: dict[str, jax.Array]) -> jax.Array:
    point = POINTS[probe.point]
    if point not in reached:
        return jnp.float32(jnp.nan)
    x = reached[point]
    x = jnp.max(x, axis=(2, 3)) if probe.point == "scores" else x
    found = _of_tokens(probe, x)
    if probe.reduce == "max":
        return jnp.max(found)
    return jnp.mean(found) if probe.reduce == "mean" else jnp.sum(found)


FEATURE = OwnProbes()
