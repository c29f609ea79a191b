"""What µP changes in the declaration of parameters.

A dimension that grows with the model is wider than that of the base model by a ratio, which follows
from its logical axis. With a the ratio of a matrix's inputs (rows):

    matrices of layers     initial standard deviation / sqrt(a)     Adam's learning rate / a
    routers, expert gates  initial standard deviation / a           Adam's learning rate / a
    all others             as in the base model

The embedding's inputs and the head's outputs are tokens, whose number does not grow. The head's
inputs do, and its logits are divided by the width instead (`Model.logits_divisor`), so that
the embedding may also be the head.

Source:   Yang et al. 2022 (2203.03466), table 8; Dey et al. 2025 (2505.01618), table 1, with an
          alpha of 1, for `base_depth` and for eps.
"""

import dataclasses
import math
from typing import Any

from jaxpar.components.attention import Attention
from jaxpar.components.experts import d_ff, head_dim
from jaxpar.components.model import Layer
from jaxpar.config import Model, MupConfig
from jaxpar.sharding.params import ParamSpec

type Tree = dict[str, Any]


def ratios(m: Model) -> dict[str, float]:
    """Return, by logical axis, how many times larger a dimension is than in the base model.

    Heads times the width of a head grow with the model, as do experts' widths with d_ff. Latents
    have the width of the base model's.
    """
    mup = m.mup or MupConfig(base_width=m.d_model)
    width = m.width_multiplier
    hidden = d_ff(m) / mup.base_d_ff if mup.base_d_ff else width
    head = head_dim(m) / mup.base_head_dim if mup.base_head_dim else 1.0
    found = dict.fromkeys(("embed", "expert_embed"), width)
    found |= dict.fromkeys(("mlp", "whole_mlp"), hidden)
    return found | dict.fromkeys(("heads", "kv_heads"), width / head) | {"head_dim": head}


def scaled(m: Model, specs: Tree) -> Tree:
    """Return the specs of the model's parameters in µP; without µP, `specs`."""
    if m.mup is None:
        return specs
    # `base_depth` scales the outputs of layers, and not those of modules (MTP).
    of_axis, stacks = ratios(m), m.stacks

    def one(spec: ParamSpec, *, in_layers: bool) -> ParamSpec:
        steeper = m.width_multiplier * (m.depth_multiplier if in_layers else 1.0)
        spec = dataclasses.replace(spec, gradient=1 / steeper)
        if spec.readout:
            width = m.width_multiplier
            return dataclasses.replace(spec, std=spec.std / width, widths=(width, 1.0))
        if not spec.columns:
            return spec
        cut = len(spec.axes) - spec.columns
        rows, columns = (
            math.prod(of_axis.get(axis, 1.0) for axis in axes)
            for axes in (spec.axes[spec.lead : cut], spec.axes[cut:])
        )
        return dataclasses.replace(spec, std=spec.std / math.sqrt(rows), widths=(rows, columns))

    def of_stack(stack: str, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return one(tree, in_layers=False)
        return {n: one(spec, in_layers=stack in stacks) for n, spec in tree.items()}

    return {name: of_stack(name, tree) for name, tree in specs.items()}


def mup_score_factor(a: Attention, m: Model) -> float:
    """Return µP's factor of attention scores, beside that of the standard parametrization."""
    if m.mup is None or m.mup.base_head_dim is None:
        return 1.0
    narrower = m.mup.base_head_dim / a.head_dim
    is_constant = a.scale is not None or a.scale_dim is not None
    return narrower if is_constant else math.sqrt(narrower)


def _score_factor(a: Attention, m: Model) -> float:
    plain = a.scale if a.scale is not None else (a.scale_dim or a.head_dim) ** -0.5
    return plain * mup_score_factor(a, m)


def standard(m: Model) -> Model:
    """Return the model in the standard parametrization that computes the same function.

    µP's factors of logits, scores and branches become those of Granite's fields. Initial weights
    and learning rates are not part of the function.
    """
    if m.mup is None:
        return m
    top: dict[str, Any] = {"mup": None, "logits_scaling": m.logits_divisor}
    top["residual_multiplier"] = m.branch_factor

    def scaled(layer: Layer) -> Layer:
        a = layer.mixer
        if not isinstance(a, Attention):
            return layer
        own = dataclasses.replace(a, scale=_score_factor(a, m), scale_dim=None)
        return dataclasses.replace(layer, mixer=own)

    return dataclasses.replace(m.with_layers(tuple(map(scaled, m.layers))), **top)


def in_words(m: Model) -> str:
    """Describe µP's factors in one line; empty without µP."""
    if m.mup is None:
        return ""
    of_axis = ratios(m)
    by_inputs = f"/ {of_axis['embed']:.4g} with d_model inputs, / {of_axis['mlp']:.4g} with d_ff"
    parts = [f"matrices of layers learn at the rate {by_inputs}"]
    parts.append(f"logits / {m.width_multiplier:.4g}")
    attention = (layer.mixer for layer in m.distinct if isinstance(layer.mixer, Attention))
    factors = dict.fromkeys(f"{_score_factor(a, m):.4g}" for a in attention)
    parts += [f"scores * {' or '.join(factors)}"] if factors else []
    if m.mup.base_depth:
        parts.append(f"branches / {m.depth_multiplier:.4g}")
    return f"base width {m.mup.base_width}: {', '.join(parts)}"
