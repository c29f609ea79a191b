"""The weights of each adapter target, and the scale of adapters."""

import math
from collections.abc import Sequence

from jaxpar.components.model import Layer, Model
from jaxpar.components.weight import Weight
from jaxpar.config import LoraConfig


def targets_of(model: Model) -> dict[str, tuple[Weight, ...]]:
    """Return the names that `lora.targets` may have, each with the matrices of a model's layers."""
    found: dict[str, dict[Weight, None]] = {}
    for layer in dict.fromkeys(model.layers):
        for weight in layer.weights(model).values():
            if weight.adapter and weight.is_matrix:
                found.setdefault(weight.adapter, {})[weight] = None
    return {target: tuple(weights) for target, weights in found.items()}


def adapted(layer: Layer, model: Model, targets: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a layer's weights that have adapters, in the order of the targets."""
    weights = layer.weights(model).items()
    return tuple(name for target in targets for name, w in weights if w.adapter == target)


def least_side(model: Model, target: str) -> int:
    """Return the smallest dimension of a target's matrices: inputs or outputs."""
    return min(min(w.num_inputs, w.num_outputs) for w in targets_of(model)[target])


def factor(lora: LoraConfig) -> float:
    """Return the factor that an adapter's output is multiplied by.

    Source:   Hu et al. 2021 (2106.09685), section 4.1; `rank_stabilized`: Kalajdzievski 2023
              (2312.03732), section 3.
    """
    return lora.alpha / (math.sqrt(lora.rank) if lora.rank_stabilized else lora.rank)
