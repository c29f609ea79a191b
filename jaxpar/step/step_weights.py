"""The weights that a step gives to the model, and the gradients that it gets for them."""

import functools
from collections.abc import Callable
from typing import Any

from jax import lax

from jaxpar.components.model import Layer
from jaxpar.config import Config
from jaxpar.model import fused_weights
from jaxpar.model.chunks import with_layers
from jaxpar.parallel.fsdp import gather as fsdp
from jaxpar.sharding.axes import FSDP_AXES


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
