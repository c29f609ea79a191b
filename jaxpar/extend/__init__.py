"""What a model of your own is written with. Experimental until version 0.2.

    component            the decorator of a component's class: its fields are options
    Mixer, FeedForward   the base classes of what a layer is composed of
    matrix, vector       the declaration of a weight
    Layer, Model         a model: [Layer(name, mixer, feed_forward), ...]
    token_loss           a loss of one function

docs/extending.md shows each with an example.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxpar.components.attention import Attention, QkNorm, QueryGrowth
from jaxpar.components.component import Component, FeedForward, Mixer, Tokens, component
from jaxpar.components.experts import Experts, Router
from jaxpar.components.feed_forward import ClampedSwiglu, Glu, Mlp
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.components.model import Layer
from jaxpar.components.recurrent import GatedDeltaNet, KimiDeltaAttention, Mamba2
from jaxpar.components.rope import Rope, RopeScaling
from jaxpar.components.weight import Weight, matrix, vector
from jaxpar.config import ModelConfig, MupConfig
from jaxpar.objectives.losses import Loss, Scores
from jaxpar.step.features.own_probes import Probe
from jaxpar.step.features.post_updates import PostUpdate
from jaxpar.training.callbacks.callback import Callback

__all__ = [
    "Attention",
    "Callback",
    "ClampedSwiglu",
    "Component",
    "Experts",
    "FeedForward",
    "GatedDeltaNet",
    "Glu",
    "KimiDeltaAttention",
    "LatentAttention",
    "Layer",
    "Loss",
    "Mamba2",
    "Mixer",
    "Mlp",
    "Model",
    "MupConfig",
    "PostUpdate",
    "Probe",
    "QkNorm",
    "QueryGrowth",
    "Rope",
    "RopeScaling",
    "Router",
    "Scores",
    "Tokens",
    "Weight",
    "component",
    "matrix",
    "swap",
    "token_loss",
    "vector",
]


MAY_IMPORT = ("components", "config", "objectives", "step", "training")


def Model(*, d_model: int, vocab_size: int, layers: Sequence[Layer], **fields: Any) -> ModelConfig:
    """Compose a model. The list is the model: nothing else says what differs between layers.

    Args:     layers: by Python's list arithmetic: [local] * 5 + [wide]. Layers with one name are
              equal, and their weights are stacked. fields: of the section `model` that are not of
              layers: norm_eps, tie_embeddings, ...
    """
    return ModelConfig(d_model=d_model, vocab_size=vocab_size, layers=tuple(layers), **fields)


def swap(model: ModelConfig, name: str, **fields: Any) -> ModelConfig:
    """Return a composed model in which the layers of a name have another part.

    Args:     name: of the layers. fields: of `Layer`: mixer, feed_forward, norms, parallel, scaled.
    Raises:   ValueError if no layer has the name.
    """
    if name not in {layer.name for layer in model.layers}:
        names = ", ".join(dict.fromkeys(layer.name for layer in model.layers)) or "none"
        raise ValueError(f"no layer is named {name}; there are {names}")
    layers = (
        dataclasses.replace(layer, **fields) if layer.name == name else layer
        for layer in model.layers
    )
    return model.with_layers(tuple(layers))


def token_loss(function: Callable[[Scores, Any], Any]) -> Loss:
    """Make a loss of a function (scores, batch) -> [B, T], or (values, weights).

    The loss is the mean over labeled tokens, or that of values by weights, on every mesh.
    """
    fields: dict[str, Any] = {"__call__": lambda _, scores, batch: function(scores, batch)}
    for name in ("__module__", "__qualname__", "__doc__"):
        fields[name] = getattr(function, name)
    return type(function.__name__, (Loss,), fields)()
