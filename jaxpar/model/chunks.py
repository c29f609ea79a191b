"""The layers of a chunk: what a device executes at once, as the fused layout has it.

A chunk is a tuple with the weights of each layer (`parallel.layer_loop` unroll); or, for scan, the
stacked weights of equal layers, or a list with those of each layer of a period.
"""

import functools
from collections.abc import Callable
from typing import Any

from jaxpar.components.model import STACK_OF_MODULES, Layer
from jaxpar.config import Config, Model
from jaxpar.config.layout.layer_split import layers_before_stages, slots_per_chunk

#: What the prefixes of layers before the stages begin with, before their index.
BEFORE_STAGES = "dense"


@functools.lru_cache(maxsize=256)
def layers_of_chunk(cfg: Config) -> tuple[Layer, ...]:
    """Return the layer of each slot of a chunk of a stage: the same layers in every chunk."""
    before = layers_before_stages(cfg.model, cfg.parallel)
    return cfg.model.layers[before:][: slots_per_chunk(cfg)]


def scan_period(layers: tuple[Layer, ...]) -> int:
    """Return the number of layers of a scan's step: the least of which `layers` are repetitions."""
    sizes = (n for n in range(1, len(layers)) if len(layers) % n == 0)
    return next((n for n in sizes if layers[n:] == layers[:-n]), len(layers))


def map_layers(fn: Callable[..., Any], layers: tuple, *rest: tuple) -> tuple:
    """Apply `fn` to each tree in fused layers and the corresponding trees in `rest`."""

    def in_chunk(chunk: Any, *others: Any) -> Any:
        several = isinstance(chunk, (tuple, list))
        return type(chunk)(map(fn, chunk, *others)) if several else fn(chunk, *others)

    return tuple(map(in_chunk, layers, *rest))


def with_layers(fn: Callable[..., Any], cfg: Config, layers: tuple, *rest: tuple) -> tuple:
    """`map_layers` of a function that takes the `Layer` first."""
    declared = layers_of_chunk(cfg)

    def in_chunk(chunk: Any, *others: Any) -> Any:
        if not isinstance(chunk, (tuple, list)):
            return fn(declared[0], chunk, *others)
        return type(chunk)(map(fn, declared, chunk, *others))

    return tuple(map(in_chunk, layers, *rest))


def layer_outside(prefix: str, m: Model) -> Layer:
    """Return a layer outside the stages. Args:     prefix: what its flat names begin with."""
    if prefix.startswith(STACK_OF_MODULES):
        return m.module_layer
    return m.layers[int(prefix.strip(".").removeprefix(BEFORE_STAGES))]
