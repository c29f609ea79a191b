"""What a layer is composed of: `Mixer` and `FeedForward`, the two kinds of components."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jaxpar.components.weight import Weight

if TYPE_CHECKING:
    from jaxpar.components.model import Model


@dataclass(frozen=True, kw_only=True)
class Component:
    """Base of all that a model is composed of: a frozen dataclass of numbers, texts, components."""


@dataclass(frozen=True, kw_only=True)
class Term(Component):
    """A term of the residual stream, as a function of the stream's norm."""

    output_bias: ClassVar[str] = ""
    """Name of the bias [D] that is added to the sum over tensor ranks."""
    points: ClassVar[tuple[str, ...]] = ()
    """Points of probes and feeds within the component (`model/probes.py`)."""

    def weights(self, model: "Model") -> Mapping[str, Weight]:
        """Declare the weights of one layer, in the order in which they are used.

        Args:     model: `d_model` and `norm` are read.
        """
        raise NotImplementedError

    def plain(self, h: Any, w: Any, positions: Any, segments: Any, model: "Model") -> Any:
        """Compute the component in plain jax.numpy on one device: what every mesh is compared with.
        Those of our own components are in `model/plain`.

        Args:
            h: the normalized stream, float32 [B, T, D].
            w: the weights by name, with their declared shapes, float32.
            positions: of tokens in their documents, int32 [B, T].
            segments: the document of each token, int32 [B, T].
            model: `d_model` and `norm`, among others.
        Returns:  what the component adds to the stream, float32 [B, T, D].
        """
        raise NotImplementedError(f"{type(self).__name__} defines no method `plain`")


@dataclass(frozen=True, kw_only=True)
class Mixer(Term):
    """Mixes the tokens of a sequence: attention, or a recurrence in its place."""

    recurrent: ClassVar[bool] = False
    """Whether it carries a state from token to token, in text order."""


@dataclass(frozen=True, kw_only=True)
class FeedForward(Term):
    """Processes each token alone."""
