"""What a layer is composed of: `Mixer` and `FeedForward`, the two kinds of terms."""

import dataclasses
import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, dataclass_transform

from jaxpar.components.costs import Heads, Projection, Widths
from jaxpar.components.dims import DimRule, SmallSizes, divisions, smaller
from jaxpar.components.weight import Weight

if TYPE_CHECKING:
    from jaxpar.components.model import Model


#: Logical axes that the tensor axis of a mesh splits.
_SPLIT = frozenset({"heads", "kv_heads", "mlp"})

#: In which form a component's matmuls can read the norm of its input (`Execution.norm`).
type NormForm = Literal["written", "deferred_scale", "in_quantizer"]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def component[C](cls: type[C]) -> type[C]:
    """Make a class a component: a frozen dataclass, whose fields are options of a config."""
    return dataclass(frozen=True, kw_only=True)(cls)


@dataclass(frozen=True, kw_only=True)
class Component:
    """Base of all that a model is composed of: a frozen dataclass of numbers, texts, components."""

    def __str__(self) -> str:
        """The class, and the fields that are not the defaults."""
        values = ((f, getattr(self, f.name)) for f in dataclasses.fields(self))
        given = (f"{field.name}={value}" for field, value in values if value != field.default)
        return f"{type(self).__name__}({', '.join(given)})"


def named_in(place: str) -> Any:
    """Return what `module:name` names. Its module is imported when a model has the component."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


class Tokens(NamedTuple):
    """The tokens of whole sequences."""

    positions: Any
    """int32 [B, S], in their documents."""
    segments: Any
    """int32 [B, S]: the documents. A token may see only its own."""


@dataclass(frozen=True, kw_only=True)
class Term(Component):
    """A term of the residual stream, as a function of the stream's norm."""

    output_bias: ClassVar[str] = ""
    """Name of the bias [D] that is added to the sum over tensor ranks."""
    points: ClassVar[tuple[str, ...]] = ()
    """Points of probes and feeds within the component (`model/probes.py`)."""
    computed_by: ClassVar[str]
    """module:name of its `model.layer.Computation`. Without: its methods compute."""
    plain_by: ClassVar[str]
    """module:name of its plain form. Without: its methods."""
    uses_products: ClassVar[bool] = False
    """Whether its matrices are multiplied by `linear.products`, which rounds to float8 and sums
    gradients in float32. False: it gets plain arrays in the compute dtype."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "compute" in vars(cls):  # which sees plain arrays, whatever its base class does
            cls.uses_products = False

    def weights(self, model: "Model") -> Mapping[str, Weight]:
        """Declare the weights of one layer, in the order in which they are used.

        Args:     model: `d_model` and `norm` are read.
        """
        raise NotImplementedError

    def declared(self, model: "Model") -> dict[str, Weight]:
        """Return the weights, as the step treats them."""
        weights = self.weights(model)
        if self.uses_products:
            return dict(weights)
        plain: dict[str, Any] = {"float8": False, "in_products": False}
        plain |= {"into": "", "into_optional": ""}
        return {name: dataclasses.replace(w, **plain) for name, w in weights.items()}

    def compute(self, x: Any, w: dict[str, Any], tokens: Any) -> Any:
        """Compute the term. See `Mixer` and `FeedForward`; ours compute in `jaxpar/model`."""
        raise NotImplementedError(f"{type(self).__name__} defines no method `compute`")

    def plain(self, h: Any, w: Any, positions: Any, segments: Any, model: "Model") -> Any:
        """Compute the component in plain jax.numpy on one device: what every mesh is compared with.

        Those of our own components are in `model/plain`. By default it is `compute`: the comparison
        then shows that the sharding is right, and not the mathematics.

        Args:
            h: the normalized stream, float32 [B, T, D].
            w: the weights by name, with their declared shapes, float32.
            positions: of tokens in their documents, int32 [B, T].
            segments: the document of each token, int32 [B, T].
            model: `d_model` and `norm`, among others.
        Returns:  what the component adds to the stream, float32 [B, T, D].
        """
        return self.compute(h, w, Tokens(positions, segments))

    @property
    def has_plain(self) -> bool:
        """Whether it defines `plain`."""
        return type(self).plain is not Term.plain

    def rules(self, model: "Model", parallel: Any) -> Iterator[DimRule]:
        """Yield the conditions of the fields on a mesh.

        By default: mesh axes divide the dims that they split, by the logical axes of `weights`.

        Args:     parallel: the section of a config, resolved.
        """
        yield from divisions(self, model, parallel)

    def shrunk(self, sizes: SmallSizes) -> Self:
        """Return a small component of the same kind, whose dims all meshes divide.

        By default, fields that make dims of weights get smaller; see `smaller`.
        """
        return smaller(self, sizes)

    # ---------------------------------------------------------------------------------- costs
    # Defaults follow from `weights`. Overrides make them exact, or count what is not a matmul.

    products: ClassVar[tuple[str, str]]
    """Names of its matmuls in `matmuls`: of the input, and to the residual stream."""

    @property
    def norm_forms(self) -> tuple[NormForm, ...]:
        """Forms in which its matmuls can read the norm of its input. "written" is always right."""
        return ("written",)

    def num_idle(self, model: "Model") -> int:
        """Return the number of parameters that are not used for a token, of those of a layer."""
        return 0

    def matmuls(self, model: "Model", tensor: int) -> dict[str, list[Projection]]:
        """Return the dense matmuls of a tensor rank, by what a remat policy saves of them.

        Args:     tensor: number of tensor ranks.
        """
        into, out = self.products
        found: dict[str, list[Projection]] = {}
        for weight, one in self._matmuls(model, tensor):
            name = "latents" if weight.inputs == "own_tokens" else into
            found.setdefault(out if weight.to_stream else name, []).append(one)
        return found

    def _matmuls(self, model: "Model", tensor: int) -> Iterator[tuple[Weight, Projection]]:
        """Yield each matrix that all tokens multiply with, and its matmul."""
        for weight in self.weights(model).values():
            if not weight.is_matrix or weight.of_experts:
                continue
            pairs = zip(weight.shape, weight.axes, strict=True)
            sizes = [n / tensor if axis in _SPLIT else n for n, axis in pairs]
            inner, outer = sizes[: -weight.columns], sizes[-weight.columns :]
            share = 1 / tensor if weight.inputs == "own_tokens" else 1.0
            yield weight, Projection(math.prod(inner), math.prod(outer), share=share)


@dataclass(frozen=True, kw_only=True)
class Mixer(Term):
    """Mixes the tokens of a sequence: attention, or a recurrence in its place.

    A subclass declares `weights`, and defines

        compute(x, w, tokens) -> y      [B, S, D], causal, in x's dtype

    Args:     x: [B, S, D], the norm of the residual stream, whole sequences. w: the weights of this
              tensor rank, by name, with the declared dims. tokens: `Tokens`.
    Returns:  a part of the sum over tensor ranks, if it splits "heads" over them.

    Text is generated by `compute` of all tokens again. One that carries a state instead defines
    `init_state` and `step`: generation then takes one token at a time, the plain form is the
    recurrence token by token, and so is `compute`, unless it is defined.
    """

    recurrent: ClassVar[bool] = True
    """Whether it needs tokens in text order. False: any order, by `Tokens.positions`."""

    def init_state(self, rows: int, w: dict[str, Any]) -> Any:
        """Return the state before the first token of a document.

        Args:
            rows: B.
            w: as for `compute`.
        Returns:  a pytree of arrays [B, ...] of this tensor rank.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no method `init_state`")

    def step(self, x: Any, w: dict[str, Any], state: Any, positions: Any) -> tuple[Any, Any]:
        """Take the next token of each row.

        Args:
            x: [B, D].
            w: as for `compute`.
            state: that of the tokens before, as `init_state` returns it.
            positions: of the tokens in their documents, int32 [B].
        Returns:  (y [B, D], as `compute` returns it for the token; the state after it).
        """
        raise NotImplementedError(f"{type(self).__name__} defines no method `step`")

    @property
    def has_state(self) -> bool:
        """Whether it defines `init_state` and `step`."""
        return type(self).step is not Mixer.step

    # ---------------------------------------------------------------------------------- costs

    products: ClassVar[tuple[str, str]] = ("qkv", "wo")

    @property
    def attention_heads(self) -> Heads | None:
        """The heads of softmax attention. None for a mixer that is something else."""
        return None

    @property
    def is_local(self) -> bool:
        """Whether queries attend to some of the keys before them alone: a window, or chunks."""
        return False

    @property
    def output_passes(self) -> int:
        """Times that its output is read or written again in a forward, beside its kernels."""
        return 0

    def num_pairs(self, length: int) -> float:
        """Return the query-key pairs of a sequence of one document."""
        return length * length / 2

    def pair_flops(self) -> float:
        """Return the FLOPs of a forward for one query and one key, in all heads."""
        heads = self.attention_heads
        return 2 * heads.queries * (heads.key_dim + heads.value_dim) if heads else 0.0

    def pair_kernel_flops(self) -> float:
        """Return the FLOPs of attention kernels for one query and one key, forward and backward:
        7 products, since the backward computes the scores again; 4 are of keys and 3 of values."""
        heads = self.attention_heads
        return heads.queries * (8 * heads.key_dim + 6 * heads.value_dim) if heads else 0.0

    def model_flops(self) -> float:
        """Return the FLOPs per token, forward and backward, of a recurrence as MFU defines them:
        token by token, beside matmuls with weights."""
        return 0.0

    def token_flops(self, tensor: int) -> float:
        """Return the FLOPs of a forward per token and tensor rank that a recurrence computes."""
        return 0.0

    def backward_bytes(self, tensor: int, *, by_kernels: bool) -> float:
        """Return the bytes per token and tensor rank that its backward needs at once, beside what
        the backward of any layer needs. Args:     by_kernels: rather than plain JAX."""
        return 0.0

    def matmuls(self, model: "Model", tensor: int) -> dict[str, list[Projection]]:
        """Matmuls with inputs of one width count as one, of all their columns."""
        found = super().matmuls(model, tensor)
        return {name: _joined(of) for name, of in found.items()}

    def widths(self, model: "Model", tensor: int) -> Widths:
        """Return the values per token of its arrays."""
        out, projected, latents = 0.0, 0.0, 0.0
        for weight, one in self._matmuls(model, tensor):
            if weight.to_stream:
                out += one.inner
            elif weight.inputs == "own_tokens":
                latents += one.out
            elif weight.axes[0] == "embed":
                projected += one.out
        return Widths(0.0, 0.0, projected, out, projected, latents)

    def received(self, model: "Model") -> float:
        """Return the values per token that a tensor rank gathers to compute it."""
        reads_stream = any(
            weight.axes[0] == "embed" and weight.inputs != "own_tokens"
            for weight, _ in self._matmuls(model, 1)
        )
        return reads_stream * model.d_model + self.widths(model, 1).latents


def _joined(of: list[Projection]) -> list[Projection]:
    columns: dict[tuple[float, float], float] = {}
    for one in of:
        columns[one.inner, one.share] = columns.get((one.inner, one.share), 0) + one.out
    return [Projection(inner, out, share=share) for (inner, share), out in columns.items()]


@dataclass(frozen=True, kw_only=True)
class FeedForward(Term):
    """Processes each token alone.

    A subclass declares `weights`, and defines

        compute(x, w, _) -> y           [B, T, D], in x's dtype

    with x and w as those of a `Mixer`, of some of the tokens.
    """

    # ---------------------------------------------------------------------------------- costs

    products: ClassVar[tuple[str, str]] = ("gate_up", "down")

    @property
    def fuses_gate_up(self) -> bool:
        """Whether one matmul may compute gate and up (`Execution.fused_gate_up`)."""
        return False

    def hidden(self, model: "Model", tensor: int) -> tuple[float, float]:
        """Return the values per token of a tensor rank, of all tokens: those of the projections
        of the input, and those that the last matmul reads."""
        found = self.matmuls(model, tensor)
        into, out = (found.get(name, []) for name in self.products)
        return sum(one.out for one in into), sum(one.inner for one in out)
