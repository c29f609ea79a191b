"""The items of lists in a config: datasets and their weights, sizes by step, layers by slice."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from jaxpar.components.ranges import Count, Natural, NotNegative, Positive, Range, Reals
from jaxpar.config.listed import Item
from jaxpar.config.rules.limits import MAX_SEQUENCE


@dataclass(frozen=True)
class Source(Item):
    """A dataset of a mixture."""

    key: ClassVar[str] = "path"

    path: str
    """Dataset, as data.path."""
    weight: Positive
    """Share of the sequences, relative to the other weights."""


@dataclass(frozen=True)
class FromStep(Item):
    """What holds from a step on."""

    key: ClassVar[str] = "step"
    ascending: ClassVar[bool] = True

    step: Natural
    """Steps before it."""


@dataclass(frozen=True)
class MixtureWeights(FromStep):
    """Weights of the sources of a mixture."""

    step: Count
    """Steps before it."""
    weights: tuple[NotNegative, ...]
    """One for each source, in its order. 0 leaves a source out."""


@dataclass(frozen=True)
class SequenceLength(FromStep):
    """Length of sequences."""

    tokens: Annotated[int, Range(1, MAX_SEQUENCE)]
    """Tokens of a sequence."""


@dataclass(frozen=True)
class BatchSize(FromStep):
    """Size of batches."""

    sequences: Annotated[int, Range(1, MAX_SEQUENCE)]
    """Sequences of a step, on all devices."""


@dataclass(frozen=True)
class LossWeight(FromStep):
    """A point of the weight of a loss by step."""

    weight: NotNegative
    """Weight at this step."""


@dataclass(frozen=True)
class StepShare(FromStep):
    """What steps count as in a schedule."""

    share: Annotated[float, Reals(0, 1, above=True)]
    """Share of a whole step."""


@dataclass(frozen=True)
class EvaluationSet(Item):
    """A set of text with its own loss."""

    most: ClassVar[int] = 64
    key: ClassVar[str] = "name"

    name: str
    """Its name in metrics."""
    path: str
    """Dataset, as data.path."""
    split: Literal["train", "val", "test"] | None = None
    """Its split. None: evaluation.split."""


#: Rematerialization policies (`remat_policies.REMAT_POLICIES`).
RematPolicy = Literal["none", "dots", "dots_offload", "attn_out", "full", "offload"]

#: Values that can be saved for the backward pass instead of recomputed, in forward order.
RematName = Literal[
    "attn_norm",
    "latents",
    "latent_norms",
    "qkv",
    "qk",
    "attn_out",
    "attn_lse",
    "attn_residual",
    "mlp_norm",
    "gate_up",
    "mlp_hidden",
]

#: More of them, of layers with experts. No policy saves them: what other devices have takes more
#: memory than anything else in a layer.
ExpertName = Literal["moe_tokens", "moe_weights"]


@dataclass(frozen=True)
class RematValue(Item):
    """A value that is saved for the backward pass."""

    name: RematName | ExpertName | Literal["layer_input"]
    """Its name (docs/parallelism.md#rematerialization)."""
    on: Literal["device", "host"] = "device"
    """The memory in which it waits. host: copied there in the forward, and back in the backward."""


#: A policy, or the values to save.
type Remat = RematPolicy | tuple[RematValue, ...]


@dataclass(frozen=True)
class RematSlice(Item):
    """Layers with another rematerialization policy: a slice, as in Python."""

    policy: Remat
    """As `remat`."""
    start: int | None = None
    """First layer. None: the first of all."""
    stop: int | None = None
    """The layer after the last one. None: to the end."""
    step: Annotated[int | None, Range(1)] = None
    """As in a slice: 2 is every second layer. None: each."""
