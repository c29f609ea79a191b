"""Mixture of experts: several feed-forwards, of which each token uses a few.

Source:   Shazeer et al. 2017 (1701.06538), section 2.1.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from jaxpar.components.component import Component, FeedForward, NormForm
from jaxpar.components.dims import DimRule, SmallSizes
from jaxpar.components.feed_forward import Glu
from jaxpar.components.model import Model
from jaxpar.components.ranges import Positive, Range, Size
from jaxpar.components.weight import Weight, matrix, vector

#: The losses of a router, as named in metrics: the last dim of `losses` at the point "routing".
LOSSES = ("balance_loss", "router_z_loss")

#: The weight of `Router.balancing_bias`, [E]. No gradient trains it.
BALANCING_BIAS = "router_bias"


@dataclass(frozen=True, kw_only=True)
class Router(Component):
    """Which experts a token is sent to, with which weights."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts, from the router's logits. sigmoid: independent ones (DeepSeek-V3)."""
    normalize: bool = True
    """Normalize the weights of a token's experts to sum to 1."""
    linear_bias: bool = False
    """Bias on the logits, trained like any weight (gpt-oss)."""
    balancing_bias: bool = False
    """A bias on the scores by which experts are chosen, which a step changes by the experts' loads
    (DeepSeek-V3)."""
    groups: Size = 1
    """Groups of neighboring experts; a token uses groups_per_token of them (DeepSeek-V3)."""
    groups_per_token: Size = 1
    scale: Positive = 1.0
    """Multiply the weights of a token's experts by this (DeepSeek-V3: 2.5)."""
    scales_input: bool = False
    """Multiply the input of a token's expert by its weight, in place of the output (Llama 4)."""

    def bias_on_scores(self, w: dict[str, Any]) -> Any:
        """Return the balancing bias among the weights of a layer, [E]; 0 without."""
        return w[BALANCING_BIAS] if self.balancing_bias else 0.0


@dataclass(frozen=True, kw_only=True)
class Experts(FeedForward):
    """Experts of which a router chooses some for each token."""

    expert: Glu
    """One expert: a `Glu` or an `Mlp`."""
    num_experts: Size
    experts_per_token: Size
    router: Router = Router()
    num_shared_experts: Annotated[int, Range(0, 1 << 16)] = 0
    """Experts that every token uses: one feed-forward of this many times the width."""
    shared_expert_gate: bool = False
    """Multiply their output by the sigmoid of a number for each token (Qwen3-Next)."""

    computed_by: ClassVar[str] = "jaxpar.model.moe.experts:EXPERTS"
    plain_by: ClassVar[str] = "jaxpar.model.plain.feed_forward:experts"
    points: ClassVar[tuple[str, ...]] = ("choice", "routing")
    uses_products: ClassVar[bool] = True

    def weights(self, model: Model) -> dict[str, Weight]:
        D, E, F, into = model.d_model, self.num_experts, self.expert.d_ff, self.expert.into
        axes, by_expert = ("experts", "expert_embed", "mlp"), ("router",)
        late = {"converts_late": True}
        of_router = {"columns": 0, "rank": 0, "readout": True}
        found = {"router": matrix((D, E), ("embed", "router"), **of_router)}
        if self.router.linear_bias:
            found["b_router"] = vector((E,), by_expert)
        if self.router.balancing_bias:
            found[BALANCING_BIAS] = vector((E,), by_expert, trainable=False)
        if shared := self.num_shared_experts * F:
            for n in into:
                found[f"w_shared_{n}"] = matrix((D, shared), ("embed", "mlp"))
            found["w_shared_down"] = matrix((shared, D), ("mlp", "embed"), to_stream=True)
            if self.shared_expert_gate:
                gate = vector((D,), ("norm",), "normal", readout=True)
                found["w_shared_router"] = dataclasses.replace(gate, decay=True)
        for n in into:
            found[f"w_{n}"] = matrix((E, D, F), axes, **late)
        down = ("experts", "mlp", "expert_embed")
        found["w_down"] = matrix((E, F, D), down, to_stream=True, **late)
        if self.expert.bias:
            found |= {f"b_{n}": vector((E, F), ("experts", "mlp")) for n in into}
            # Every device adds those of its tokens, whichever device has the experts.
            found["b_down"] = vector((E, D), ("every_expert", "norm"))
        return found

    def rules(self, model: Model, parallel: Any) -> Iterator[DimRule]:
        yield from super().rules(model, parallel)
        E, groups, most = self.num_experts, self.router.groups, self.router.groups_per_token
        rule = f"must be divisible by router.groups = {groups}"
        whole = -(-E // groups) * groups
        fixes = (("num_experts", whole), ("router.groups", math.gcd(E, groups)))
        yield DimRule("num_experts", E % groups == 0, rule, fixes)
        rule = f"must be at most router.groups = {groups}"
        per_token = "router.groups_per_token"
        yield DimRule(per_token, most <= groups, rule, ((per_token, groups),))
        to_choose = whole // groups * most
        rule = f"must be at most {to_choose}, the experts to choose from"
        ok = self.experts_per_token <= to_choose
        yield DimRule("experts_per_token", ok, rule, (("experts_per_token", to_choose),))
        k = self.experts_per_token
        rule = f"needs experts_per_token 1, not {k}: a token is sent once, with one weight"
        fixes = (("router.scales_input", False), ("experts_per_token", 1))
        yield DimRule("router.scales_input", k == 1 or not self.router.scales_input, rule, fixes)
        gate, shared = "shared_expert_gate", "num_shared_experts"
        ok = self.num_shared_experts > 0 or not self.shared_expert_gate
        yield DimRule(gate, ok, f"needs {shared}, which is 0", ((gate, False), (shared, 1)))
        for one in self.expert.of_activation():
            yield one.below("expert")

    def shrunk(self, sizes: SmallSizes) -> Self:
        groups, unit = self.router.groups, sizes.ways["experts"]
        in_group = min(self.num_experts // groups, 8 if groups == 1 else 2)
        unit //= math.gcd(unit, groups)
        in_group = -(-in_group // unit) * unit
        return dataclasses.replace(
            self,
            expert=self.expert.shrunk(sizes),
            num_experts=in_group * groups,
            experts_per_token=min(
                self.experts_per_token, 4, in_group * self.router.groups_per_token
            ),
        )

    # ---------------------------------------------------------------------------------- costs

    @property
    def norm_forms(self) -> tuple[NormForm, ...]:
        return ("written", "in_quantizer")

    def num_idle(self, model: Model) -> int:
        weights = self.expert.weights(model).values()
        of_expert = sum(math.prod(weight.shape) for weight in weights)
        return (self.num_experts - self.experts_per_token) * of_expert


def experts_in(model: Model) -> tuple[Experts, ...]:
    """Return the experts of each layer that has some, in the model's order."""
    found = (layer.feed_forward for layer in model.layers)
    return tuple(one for one in found if isinstance(one, Experts))


def stacks_of_experts(model: Model) -> tuple[str, ...]:
    """Return the name of each layer with experts, in the model's order."""
    return tuple(layer.name for layer in model.layers if isinstance(layer.feed_forward, Experts))


def num_experts(model: Model) -> int:
    """Return the number of experts of a layer, or a divisor of all if they differ; 0 without."""
    return math.gcd(*(of.num_experts for of in experts_in(model)))


def d_ff(model: Model) -> int:
    """Return the width of the first experts of a model, or feed-forward; of none, `d_model`."""
    forwards = [layer.feed_forward for layer in model.distinct]
    widths = [of.expert.d_ff for of in forwards if isinstance(of, Experts)]
    widths += [of.d_ff for of in forwards if isinstance(of, Glu)]
    return widths[0] if widths else model.d_model


def head_dim(model: Model) -> int:
    """Return the width of a key of the first softmax attention of a model; without, `d_model`."""
    heads = (layer.mixer and layer.mixer.attention_heads for layer in model.distinct)
    return next((of.key_dim for of in heads if of), model.d_model)
