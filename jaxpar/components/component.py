"""What a layer is composed of: `Mixer` and `FeedForward`, the two kinds of terms."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, dataclass_transform

from jaxpar.components.weight import Weight

if TYPE_CHECKING:
    from jaxpar.components.model import Model


@dataclass_transform(frozen_default=True, kw_only_default=True)
def component[C](cls: type[C]) -> type[C]:
    """Make a class a component: a frozen dataclass, whose fields are options of a config."""
    return dataclass(frozen=True, kw_only=True)(cls)


@dataclass(frozen=True, kw_only=True)
class Component:
    """Base of all that a model is composed of: a frozen dataclass of numbers, texts, components."""


class Tokens(NamedTuple):
    """The tokens of whole sequences."""

    positions: Any
    """int32 [B, S], in their documents."""
    segments: Any
    """int32 [B, S]: the documents. A token may see those of its own alone."""


@dataclass(frozen=True, kw_only=True)
class Term(Component):
    """A term of the residual stream, as a function of the stream's norm."""

    output_bias: ClassVar[str] = ""
    """Name of the bias [D] that is added to the sum over tensor ranks."""
    points: ClassVar[tuple[str, ...]] = ()
    """Points of probes and feeds within the component (`model/probes.py`)."""
    products: ClassVar[bool] = False
    """Whether its matrices are multiplied by `linear.products`, which rounds to float8 and sums
    gradients in float32. False: it gets plain arrays in the compute dtype."""

    def weights(self, model: "Model") -> Mapping[str, Weight]:
        """Declare the weights of one layer, in the order in which they are used.

        Args:     model: `d_model` and `norm` are read.
        """
        raise NotImplementedError

    def declared(self, model: "Model") -> dict[str, Weight]:
        """Return the weights, as the step treats them."""
        weights = self.weights(model)
        if self.products:
            return dict(weights)
        plain: dict[str, Any] = {"float8": False, "products": False}
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


@dataclass(frozen=True, kw_only=True)
class Mixer(Term):
    """Mixes the tokens of a sequence: attention, or a recurrence in its place.

    A subclass declares `weights`, and defines

        compute(x, w, tokens) -> y      [B, S, D], causal, in x's dtype

    Args:     x: [B, S, D], the norm of the residual stream, whole sequences. w: the weights of this
              tensor rank, by name, with the declared dims. tokens: `Tokens`.
    Returns:  a part of the sum over tensor ranks, if it splits "heads" over them.
    """

    recurrent: ClassVar[bool] = True
    """Whether it needs tokens in text order. False: any order, by `Tokens.positions`."""


@dataclass(frozen=True, kw_only=True)
class FeedForward(Term):
    """Processes each token alone.

    A subclass declares `weights`, and defines

        compute(x, w, _) -> y           [B, T, D], in x's dtype

    with x and w as those of a `Mixer`, of some of the tokens.
    """
