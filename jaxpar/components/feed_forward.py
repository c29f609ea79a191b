"""Dense feed-forwards: gated linear units, and two-matrix perceptrons.

Source:   Shazeer 2020 (2002.05202), equation 5; Vaswani et al. 2017 (1706.03762), section 3.3.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from jaxpar.components.component import Component, FeedForward, NormForm
from jaxpar.components.dims import DimRule
from jaxpar.components.model import Model
from jaxpar.components.ranges import Positive, Range
from jaxpar.components.weight import Weight, matrix, vector

type Activation = Literal["silu", "gelu", "gelu_exact", "relu_squared"]


@dataclass(frozen=True, kw_only=True)
class ClampedSwiglu(Component):
    """gate * sigmoid(alpha * gate) * (up + 1), both clamped to limit (gpt-oss)."""

    limit: Positive = 7.0
    alpha: Positive = 1.702


@dataclass(frozen=True)
class Glu(FeedForward):
    """act(h W_gate) * (h W_up), times W_down."""

    d_ff: Annotated[int, Range(1, 1 << 24, 1024)]
    activation: Activation | ClampedSwiglu = "silu"
    """gelu: the tanh approximation, as in GeGLU (Gemma)."""
    bias: bool = False

    output_bias: ClassVar[str] = "b_down"
    computed_by: ClassVar[str] = "jaxpar.model.feed_forward:GLU"
    plain_by: ClassVar[str] = "jaxpar.model.plain.feed_forward:glu"
    uses_products: ClassVar[bool] = True
    into: ClassVar[tuple[str, ...]] = ("gate", "up")
    """The projections of the input."""
    activations: ClassVar[tuple[str, ...]] = ("silu", "gelu")
    """Names of activations that it may have."""

    def weights(self, model: Model) -> dict[str, Weight]:
        D, F, axes, late = model.d_model, self.d_ff, ("embed", "mlp"), {"converts_late": True}
        fused = {"into_optional": "w_gate_up" if len(self.into) == 2 else ""}
        found = {
            f"w_{n}": matrix((D, F), axes, adapter=f"{n}_proj", **fused, **late) for n in self.into
        }
        found["w_down"] = matrix((F, D), axes[::-1], to_stream=True, adapter="down_proj", **late)
        if self.bias:
            found |= {f"b_{n}": vector((F,), ("mlp",)) for n in self.into}
            found["b_down"] = vector((D,), ("norm",))
        return found

    def rules(self, model: Model, parallel: Any) -> Iterator[DimRule]:
        yield from super().rules(model, parallel)
        yield from self.of_activation()

    def of_activation(self) -> Iterator[DimRule]:
        """Yield the rule of the activation."""
        ok = self.activation in self.activations or (
            isinstance(self.activation, ClampedSwiglu) and "gate" in self.into
        )
        rule = f"must be one of {', '.join(self.activations)} in {type(self).__name__}"
        yield DimRule("activation", ok, rule, (("activation", "gelu"),))

    # ---------------------------------------------------------------------------------- costs

    @property
    def norm_forms(self) -> tuple[NormForm, ...]:
        both: tuple[NormForm, ...] = ("written", "in_quantizer")
        return (*both, "deferred_scale") if self.fuses_gate_up else both

    @property
    def fuses_gate_up(self) -> bool:
        return self.activation == "silu" and len(self.into) == 2 and not self.bias


@dataclass(frozen=True)
class Mlp(Glu):
    """act(h W_up) W_down, of two matrices (GPT-3, Nemotron 3)."""

    computed_by: ClassVar[str] = "jaxpar.model.feed_forward:MLP"

    into: ClassVar[tuple[str, ...]] = ("up",)
    activations: ClassVar[tuple[str, ...]] = ("silu", "gelu", "gelu_exact", "relu_squared")
