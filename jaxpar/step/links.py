"""The chain between the parameters in the state and the weights that the model computes with.

A link transforms the weights of a step, and its `back` transforms their gradients. A chain runs the
links in order, and their backs in reverse: what is added last is removed first.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxpar.components.model import Layer
from jaxpar.config import Config
from jaxpar.execution.decisions import Execution
from jaxpar.model import fused_weights, probes
from jaxpar.model.chunks import with_layers
from jaxpar.model.parameters import specs_of, trainable_specs
from jaxpar.optimizer import loss_scale
from jaxpar.parallel.collectives import varying
from jaxpar.parallel.fsdp import gather as fsdp
from jaxpar.parallel.gradients import reduce_gradients
from jaxpar.sharding.axes import AXES, FSDP_AXES
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.params import join, split
from jaxpar.step.diloco.trainers import trainer_axes
from jaxpar.step.feature import Feature
from jaxpar.step.layer_order import slots_in_use
from jaxpar.step.progress import TrainStep

type Tree = Any

#: What is found on the way back beside gradients, by name.
type Found = dict[str, Any]


class Weights(NamedTuple):
    """The weights of a step, on local shards."""

    trainable: Tree
    """Those that have gradients."""
    frozen: Tree = {}  # noqa: RUF012, never changed
    """Those that have none."""
    beside: Tree = {}  # noqa: RUF012
    """What layers read in addition, {"top", "layers"}, to be joined with the frozen weights."""


type Back = Callable[[Tree], tuple[Tree, Found]]
type Link = Callable[[Weights], tuple[Weights, Back]]

#: The name of what probes have measured, among what is found.
PROBES = "probes"

#: Local gradients -> (their sums over the mesh, what was found).
type Sum = Callable[[Tree], tuple[Tree, Found]]


def chain(links: Iterable[Link]) -> Link:
    """Return the link that applies links in order, and their backs in reverse."""

    def through(w: Weights) -> tuple[Weights, Back]:
        backs = []
        for link in links:
            w, back = link(w)
            backs.append(back)

        def all_back(grads: Tree) -> tuple[Tree, Found]:
            found: Found = {}
            for back in reversed(backs):
                grads, more = back(grads)
                found |= more
            return grads, found

        return w, all_back

    return through


def of_parameters(ex: Execution, reduce: Sum) -> list[Link]:
    """The links of a training step, from the state to the model, but for probes."""
    return [
        on_device(ex),
        replicated(reduce),
        separated(ex),
        fused(ex),
        gathered(ex),
        frozen_base(ex),
    ]


def of_evaluation(ex: Execution, values: Tree) -> list[Link]:
    """The links of a step without gradients. `values`: as in `fed`."""
    plain = lambda w: (w._replace(trainable=fused_weights.fuse(w.trainable, ex)), _unchanged)  # noqa: E731
    return [on_device(ex), replicated(_unchanged), plain, gathered(ex), fed(values), slots(ex)]


def _unchanged(grads: Tree) -> tuple[Tree, Found]:
    return grads, {}


def on_device(ex: Execution) -> Link:
    """Copies masters from host memory, layer by layer."""
    if not ex.cfg.optimizer.offload_masters:
        return lambda w: (w, _unchanged)
    from jaxpar.step.host_masters import weights_on_device

    return lambda w: (w._replace(trainable=weights_on_device(w.trainable, ex.cfg)), _unchanged)


def replicated(reduce: Sum) -> Link:
    """Each device has its own copy of what is replicated; gradients are summed over the mesh."""
    return lambda w: (w._replace(trainable=varying(w.trainable)), reduce)


def sum_of(features: Iterable[Feature], s: TrainStep) -> Sum:
    """Return the sum of gradients over the mesh, divided by the loss scale: in float32, or as a
    feature does it.

    Communication: `reduce_gradients`.
    """
    cfg, specs = s.cfg, trainable_specs(s.cfg)

    def reduce(grads: Tree) -> tuple[Tree, Found]:
        for feature in features:
            if feature.reduce is not None and s.step is not None:
                grads, kept = feature.reduce(grads, specs, s)
                return grads, {feature.name: kept}
        grads = reduce_gradients(grads, specs, trainer_axes(cfg, AXES))
        return loss_scale.unscale_gradients(grads, s.scale, scaled=s.ex.scales_loss), {}

    return reduce


def separated(ex: Execution) -> Link:
    """Separates the trainable parameters from the frozen ones."""
    return lambda w: (Weights(*split(w.trainable, specs_of(ex.cfg))), _unchanged)


def fused(ex: Execution) -> Link:
    """Converts trainable parameters to the fused layout; linear, so that its transpose converts
    gradients back."""

    def link(w: Weights) -> tuple[Weights, Back]:
        shards, transpose = jax.vjp(lambda p: fused_weights.fuse(p, ex), w.trainable)
        return w._replace(trainable=shards), lambda grads: (*transpose(grads), {})

    return link


def gathered(ex: Execution) -> Link:
    """With ZeRO-1 and 2, gathers each weight once, for all microbatches; adds float8's scales.

    With ZeRO-2, complete weights are beside the shards, which have the gradients.
    Communication: gathers over FSDP_AXES, and for ZeRO-1 scatters in the backward.
    """
    cfg = ex.cfg

    def link(w: Weights) -> tuple[Weights, Back]:
        shards = w.trainable
        weights, beside = weights_of_step(shards, cfg), w.beside
        if cfg.parallel.zero == 2:
            weights, complete = fused_weights.to_shards(weights, shards, ex.cfg)
            beside = join(complete, beside)
        return w._replace(trainable=weights, beside=beside), back

    def back(grads: Tree) -> tuple[Tree, Found]:
        grads = fused_weights.without_scales(grads)
        return scatter_once(grads, cfg) if cfg.parallel.zero == 1 else grads, {}

    return link


def frozen_base(ex: Execution) -> Link:
    """Converts frozen parameters as `fused` and `gathered` do with those that are trained."""

    def link(w: Weights) -> tuple[Weights, Back]:
        frozen = w.frozen
        if frozen:
            frozen = weights_of_step(fused_weights.fuse(frozen, ex), ex.cfg)
        return w._replace(frozen=frozen), _unchanged

    return link


def probed(ex: Execution, which: tuple[probes.LayerProbe, ...], batch: Batch) -> Link:
    """Adds the zeros of probes to layers; their gradients are what the layers have measured."""

    def link(w: Weights) -> tuple[Weights, Back]:
        weights = probes.attach(w.trainable, which, batch, ex.cfg)
        return w._replace(trainable=weights), back

    def back(grads: Tree) -> tuple[Tree, Found]:
        grads, found = probes.detach(grads, ex.cfg)
        return grads, {PROBES: found}

    return link


def fed(values: Tree) -> Link:
    """Adds arrays for layers to read, {"top", "layers"}; {} for none."""
    return lambda w: (w._replace(beside=join(w.beside, values)), _unchanged)


def slots(ex: Execution) -> Link:
    """Says which slots of a stage have a layer, and joins everything without gradients."""

    def link(w: Weights) -> tuple[Weights, Back]:
        frozen = join(join(w.beside, w.frozen), slots_in_use(ex.cfg))
        return Weights(w.trainable, frozen), _unchanged

    return link


# -------------- The weights that a step gives to the model, and the gradients that it gets for them


def weights_of_step(shards: Any, cfg: Config) -> Any:
    """Return the weights that the model receives, with scales (`fused_weights.with_scales`).

    With ZeRO-3 these are shards, which the model gathers; with ZeRO-1 and ZeRO-2, complete weights.
    """
    once = cfg.parallel.zero != 3
    weights = gather_once(shards, cfg) if once else shards
    if once and "embed" in shards["top"] and lax.axis_size(FSDP_AXES) == 1:
        # Keep float32: without a gather, only the rows that a step looks up need to be cast.
        weights["top"]["embed"] = shards["top"]["embed"]
    return fused_weights.with_scales(weights, shards, cfg)


def gather_once(shards: Any, cfg: Config) -> Any:
    """Gather every weight in the compute dtype once, for all microbatches (ZeRO-1 and ZeRO-2)."""

    def gather(shards: dict, dims: dict) -> dict:
        whole = fsdp.gather_tree(shards, dims, cfg.compute.dtype, cfg.parallel.grad_reduce)
        if cfg.compute.matmul_dtype != "compute":
            return whole
        # Materialize each weight once. If there is nothing to gather, XLA would repeat the
        # concatenation of the fused matrices in every matmul that reads them.
        return {name: lax.optimization_barrier(w) for name, w in whole.items()}

    return _map_groups(gather, shards, cfg)


def scatter_once(grads: Any, cfg: Config) -> Any:
    """Reduce the step's accumulated gradients to shards (ZeRO-1)."""
    scatter = functools.partial(fsdp.scatter_tree, reduce=cfg.parallel.grad_reduce)
    return _map_groups(scatter, grads, cfg)


def _map_groups(fn: Callable, tree: Any, cfg: Config) -> Any:
    """Apply `fn(arrays, dims)` to the arrays outside the layers and to those of each layer."""

    def of_layer(layer: Layer, w: Any) -> Any:
        return fn(w, dims=fused_weights.layer_dims(w, layer, cfg.model))

    layers = with_layers(of_layer, cfg, tree["layers"])
    top = tree["top"]
    return {"top": fn(top, dims=fused_weights.top_dims(top, cfg.model)), "layers": layers}
