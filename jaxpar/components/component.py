"""What a layer is composed of: `Mixer` and `FeedForward`, the two kinds of components."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

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


@dataclass(frozen=True, kw_only=True)
class Mixer(Term):
    """Mixes the tokens of a sequence: attention, or a recurrence in its place."""

    recurrent: ClassVar[bool] = False
    """Whether it carries a state from token to token, in text order."""


@dataclass(frozen=True, kw_only=True)
class FeedForward(Term):
    """Processes each token alone."""
