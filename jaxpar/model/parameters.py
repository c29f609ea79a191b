"""The model's parameters: their specs, and which are trainable."""

import dataclasses
import math
from typing import Any

from jaxpar.components import weight
from jaxpar.components.model import Layer
from jaxpar.components.weight import Weight
from jaxpar.config import Config, LoraConfig, Model
from jaxpar.config.layout.placement import spreads_experts
from jaxpar.model import lora, mtp
from jaxpar.model.mup import scaled
from jaxpar.sharding.params import ParamSpec, split

type Tree = dict[str, Any]


def param_specs(m: Model, adapters: LoraConfig | None = None, *, spread: bool = False) -> Tree:
    """Return the specs of the model's parameters: shapes, logical axes, initial distributions.

    Weights are initialized from a normal distribution with standard deviation `init_std`. The
    matrices that write to the residual stream use init_std / sqrt(2 L), so that its variance does
    not grow with depth (GPT-2, section 2.3). µP changes both (`mup.py`).

    The weights of layers with one name are stacked. The modules of multi-token prediction are
    "mtp".

    Args:     adapters: `Config.lora`; None: the base model.
              spread: `spreads_experts`, which only shardings depend on.
    """
    model, top = m, top_specs(m)
    specs = {"embed": top["embed"]}
    for name, layers in model.stacks.items():
        axis = "depth" if name in model.leading_stacks else "layer"
        specs[name] = _stacked(m, layers[0], len(layers), axis, spread=spread)
    specs |= top
    if m.mtp_depth:
        layers_of = _stacked(m, m.module_layer, m.mtp_depth, "depth", spread=spread)
        specs["mtp"] = mtp.specs(m, layers_of)
    specs = scaled(m, specs)
    return lora.with_adapters(specs, model, adapters) if adapters else specs


def specs_of(cfg: Config, *, adapters: bool = True) -> Tree:
    """Return the specs of a run's parameters. Args:     adapters: include those that it has."""
    lora_or_none = cfg.lora if adapters else None
    return param_specs(cfg.model, lora_or_none, spread=spreads_experts(cfg.parallel))


def trainable_specs(cfg: Config) -> Tree:
    """Return the specs of the parameters that training updates: all, or only the adapters."""
    specs = specs_of(cfg)
    return split(specs, specs)[0]


def _stacked(m: Model, layer: Layer, count: int, axis: str, *, spread: bool) -> Tree:
    """Return the specs of `count` layers' weights. Args:     axis: logical axis of the layers."""
    weights = layer.weights(m)

    def of_weight(w: Weight) -> ParamSpec:
        w = weight.spread(w) if spread else w
        std = m.init_std if w.std is None else w.std
        return ParamSpec(
            shape=(count, *w.shape),
            axes=(axis, *w.axes),
            init=w.init,
            std=std / math.sqrt(2 * m.base_depth) if w.to_stream else std,
            decay=w.decay,
            columns=w.columns,
            trainable=w.trainable,
            readout=w.readout,
        )

    return {name: of_weight(w) for name, w in weights.items()}


def top_specs(m: Model) -> Tree:
    """Return the specs of the arrays outside the layers: the embedding, the final norm, the table
    of positions and the head, if the model has them."""
    std, model = m.init_std, m
    table = ParamSpec(shape=(m.vocab_size, m.d_model), axes=("vocab", "embed"), std=std)
    norm = ParamSpec(shape=(m.d_model,), axes=("norm",), init=model.norm.init, decay=False)
    specs: Tree = {"embed": table, "final_norm": norm}
    if model.norm.kind == "layer":
        specs["final_norm_bias"] = dataclasses.replace(norm, init="zeros")
    if model.max_positions:
        specs["positions"] = dataclasses.replace(table, shape=(m.max_positions, m.d_model))
    if not model.tie_embeddings:
        shape = (m.d_model, m.vocab_size)
        specs["head"] = ParamSpec(shape=shape, axes=("embed", "vocab"), std=std)
    return specs
