"""Values that leave a layer, or enter it, beside its activations.

Layers return only activations. A probe is an array of zeros among a layer's weights: what it
measures becomes its gradient. So it is summed over microbatches, put in order by pipeline stages,
and passed through rematerialization, like the gradient of any weight. A feed is an array among the
frozen weights, which the layer reads.

    attach    weights -> weights with zeros for each probe, in every layer that has its point
    observe   in a layer, at a point: the values of its probes become the gradients of these zeros
    detach    gradients -> (those of weights, `Probed` of each probe)

A point is a place in a layer that offers its values:

    queries   attention, before scores: x is q; more: k
    choice    a router's choice of experts, which a feed may replace
    routing   experts, before dispatch: x are the weights of a token's experts; more: routing,
              rounds, losses
    layer     after a layer: x is the residual stream
    mixer_input, mixer_output, feed_forward_input, feed_forward_output
              a branch's normalized input, and what it adds to the residual stream

The point "head" is not in a layer: the last residual stream after its norm. The zeros of its probes
are among the weights outside the layers, and it counts on the last stage.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.model import STACK_OF_MODULES, Layer
from jaxpar.config import Config
from jaxpar.config.layout.layer_split import layers_before_stages
from jaxpar.model.chunks import BEFORE_STAGES, layer_outside, with_layers
from jaxpar.model.norm import named_norm
from jaxpar.parallel.collectives import varying
from jaxpar.sharding.axes import PIPELINE
from jaxpar.sharding.batch import Batch

type Tree = dict[str, Any]

#: What the names of probes and feeds among a layer's weights begin with.
PROBE, FEED = "values.", "feed."

#: The points that the layer itself offers, not one of its components.
OF_LAYER = (
    "layer",
    "mixer_input",
    "mixer_output",
    "feed_forward_input",
    "feed_forward_output",
)

#: The point after the layers.
HEAD = "head"


class Observers(NamedTuple):
    """What `observe` reads of an AttentionContext."""

    probes: tuple
    rows: jax.Array | None


class Seen(NamedTuple):
    """What a probe sees at a point of a layer. Local shards."""

    x: Any
    """The value at the point."""
    w: Tree
    """The layer's weights, complete over FSDP_AXES."""
    context: Any
    """AttentionContext."""
    cfg: Config
    more: Mapping[str, Any]
    """Other values of the point."""


@dataclass(frozen=True)
class LayerProbe:
    """A value that leaves a layer as the gradient of an array of zeros among its weights."""

    name: str
    point: str
    value: Callable[[Seen], jax.Array]
    """Computes the value, float32: a sum over the tokens of a microbatch on this device; with
    `by_row`, [B, ...]."""
    shape: Callable[[Batch, Config], tuple[int, ...]]
    """The shape for this device's batch; with `by_row`, its first dim counts all rows."""
    by_row: bool = False
    """Whether each row of the batch fills its own entry: for values that are no sums, such as
    maxima, since microbatches are added."""

    @property
    def key(self) -> str:
        return f"{PROBE}{self.point}.{self.name}"


@dataclass(frozen=True)
class Feed:
    """A value that enters a layer at a point, as a frozen weight."""

    name: str
    point: str
    use: Callable[[jax.Array, jax.Array, Any], jax.Array]
    """(value at the point, what was fed, AttentionContext) -> the value to use."""

    @property
    def key(self) -> str:
        return f"{FEED}{self.point}.{self.name}"


class Probed(NamedTuple):
    """What left the layers of this device through one probe, float32."""

    stage: jax.Array | None
    """[layers of this stage with the point, ...], in order."""
    places: tuple[int, ...]
    """Their places among the layers of the stage."""
    before: jax.Array | None = None
    """[dense layers before the stages, ...]; zeros but on the first stage."""
    modules: jax.Array | None = None
    """[modules of multi-token prediction, ...]; zeros but on the first stage."""
    head: jax.Array | None = None
    """[...], at the point "head"; it counts on the last stage."""


def is_extra(name: str) -> bool:
    """Whether a name among a layer's weights is that of a probe or a feed."""
    return name.startswith((PROBE, FEED))


def at_points(w: Tree, points: tuple[str, ...]) -> Tree:
    """Select the probes and feeds of some points."""
    return {n: a for n, a in w.items() if is_extra(n) and n.split(".")[1] in points}


# --------------------------------------------------------------------------- in a layer


def observe(
    point: str,
    x: jax.Array,
    w: Tree,
    context: Any,
    cfg: Config,
    *,
    seen: Callable[[], Any] | None = None,
    once: jax.Array | bool = True,
    adds: tuple[tuple[jax.Array, jax.Array], ...] = (),
    **more: Any,
) -> jax.Array:
    """Return x. In the backward, the probes of this point have their values as gradients.

    Args:     x: an array whose gradient is computed in every step.
              w: the layer's weights; without probes nothing happens.
              seen: returns the value at the point. None: x itself.
              once: whether sums count on this device, of those with the same tokens.
              adds: pairs of a loss and its gradient, which the backward adds.
              more: other values of the point.
    """
    here = [probe for probe in context.probes if probe.point == point and probe.key in w]
    if not here and not adds:
        return x
    value = lax.stop_gradient(x if seen is None else seen())
    at_point = Seen(value, w, context, cfg, more)
    values = [lax.stop_gradient(probe.value(at_point)) for probe in here]
    gradients = [once * weight for _, weight in adds]
    for probe, value in zip(here, values, strict=True):
        gradients.append(_by_row(w[probe.key], value, context) if probe.by_row else once * value)
    likes = [loss for loss, _ in adds] + [w[probe.key] for probe in here]
    return with_gradients(x, tuple(likes), varying(tuple(gradients)))


def observe_head(
    x: jax.Array, top: Tree, rows: jax.Array | None, probes: tuple[LayerProbe, ...], cfg: Config
) -> jax.Array:
    """`observe` at the point "head".

    Args:     x: the last residual stream. top: weights outside the layers. rows: `Batch.rows`.
    """
    norm = lambda: named_norm(x, top, "final_norm", cfg.model)  # noqa: E731
    return observe(HEAD, x, top, Observers(probes, rows), cfg, seen=norm)


def _by_row(like: jax.Array, value: jax.Array, context: Any) -> jax.Array:
    return jnp.zeros(like.shape, jnp.float32).at[context.rows].set(value)


def fed(point: str, x: jax.Array, w: Tree, context: Any) -> jax.Array:
    """Return x, or what the feeds of this point make of it."""
    for feed in context.feeds:
        if feed.point == point and feed.key in w:
            x = feed.use(x, w[feed.key], context)
    return x


@jax.custom_vjp
def with_gradients(x, likes, gradients):
    """Return x. In the backward, `likes` have the gradients given here."""
    return x


with_gradients.defvjp(
    lambda x, likes, gradients: (x, gradients), lambda gradients, d_x: (d_x, gradients, None)
)


# --------------------------------------------------------------------------- around the layers


def attach(weights: Tree, probes: tuple[LayerProbe, ...], batch: Batch, cfg: Config) -> Tree:
    """Add zeros for each probe to the layers that have its point.

    Args:     weights: fused, {"top", "layers"}.
              batch: of this device.
    """
    if not probes:
        return weights

    def zeros(some: Iterable[LayerProbe], lead: tuple[int, ...]) -> Tree:
        shape = lambda probe: (*lead, *probe.shape(batch, cfg))  # noqa: E731
        return {probe.key: varying(jnp.zeros(shape(probe), jnp.float32)) for probe in some}

    def add(layer: Layer, w: Tree, *, stacked: bool) -> Tree:
        lead = jax.tree.leaves(w)[0].shape[:1] if stacked and w else ()
        there = [probe for probe in probes if w and layer.has_point(probe.point)]
        return w | zeros(there, lead)

    scan = cfg.parallel.layer_loop == "scan"
    top = dict(weights["top"])
    for prefix in _outside(weights["top"]):
        w = {n.removeprefix(prefix): a for n, a in top.items() if n.startswith(prefix)}
        layer = layer_outside(prefix, cfg.model)
        top |= {prefix + n: a for n, a in add(layer, w, stacked=False).items()}
    top |= zeros((probe for probe in probes if probe.point == HEAD), ())
    of_layer = functools.partial(add, stacked=scan)
    return {"top": top, "layers": with_layers(of_layer, cfg, weights["layers"])}


def detach(grads: Tree, cfg: Config) -> tuple[Tree, dict[str, Probed]]:
    """Separate gradients into those of weights, and what the probes have measured, by name."""
    extra = lambda w: {n: a for n, a in w.items() if is_extra(n)}  # noqa: E731
    rest = lambda w: {n: a for n, a in w.items() if not is_extra(n)}  # noqa: E731
    top, layers = grads["top"], grads["layers"]
    of_head = extra(top)
    outside = [n for n in top if is_extra(n.partition(".")[2])]
    keys = {n.partition(".")[2] for n in outside}
    for chunk in layers:
        keys |= {n for w in _each(chunk) for n in extra(w)}
    found = {key.split(".", 2)[2]: _probed(key, grads, cfg) for key in sorted(keys)}
    found |= {key.split(".", 2)[2]: Probed(None, (), head=a) for key, a in of_head.items()}
    top = {n: a for n, a in top.items() if n not in {*outside, *of_head}}
    return {"top": top, "layers": tuple(_map(rest, chunk) for chunk in layers)}, found


def _probed(key: str, grads: Tree, cfg: Config) -> Probed:
    parts: list[jax.Array] = []
    places: list[int] = []
    at = 0
    for chunk in grads["layers"]:
        if isinstance(chunk, list):  # a period's layers, each stacked over periods
            mine = [i for i, w in enumerate(chunk) if key in w]
            count = len(jax.tree.leaves(chunk)[0])
            if mine:
                stacked = jnp.stack([chunk[i][key] for i in mine], axis=1)
                parts.append(stacked.reshape(-1, *stacked.shape[2:]))
            places += [at + k * len(chunk) + i for k in range(count) for i in mine]
            at += count * len(chunk)
        elif isinstance(chunk, tuple):
            for w in chunk:
                if key in w:
                    parts.append(w[key][None])
                    places.append(at)
                at += 1
        else:  # stacked layers
            count = len(jax.tree.leaves(chunk)[0])
            if key in chunk:
                parts.append(chunk[key])
                places += range(at, at + count)
            at += count
    stage = jnp.concatenate(parts) if parts else None
    outside = (_of_prefix(key, prefix, grads, cfg) for prefix in (BEFORE_STAGES, STACK_OF_MODULES))
    return Probed(stage, tuple(places), *outside)


def _of_prefix(key: str, prefix: str, grads: Tree, cfg: Config) -> jax.Array | None:
    """Return the values of layers outside the stages, which count on the first stage alone."""
    names = [n for n in grads["top"] if n.startswith(prefix) and n.partition(".")[2] == key]
    if not names:
        return None
    order = sorted(names, key=lambda n: int(n.partition(".")[0].removeprefix(prefix)))
    value = jnp.stack([grads["top"][n] for n in order])
    if cfg.parallel.pipeline > 1:
        value *= lax.axis_index(PIPELINE) == 0
    return value


def _outside(top: Tree) -> list[str]:
    """Return the prefixes of the layers outside the stages."""
    return sorted({name.partition(".")[0] + "." for name in top if "." in name})


def _map(fn: Callable[[Tree], Tree], chunk: Any) -> Any:
    several = isinstance(chunk, (tuple, list))
    return type(chunk)(map(fn, chunk)) if several else fn(chunk)


def _each(chunk: Any) -> list[Tree]:
    return list(chunk) if isinstance(chunk, (tuple, list)) else [chunk]


def num_before(cfg: Config) -> int:
    """Return the number of layers before the stages."""
    return layers_before_stages(cfg.model, cfg.parallel)
