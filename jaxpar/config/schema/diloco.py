"""The section `diloco`: replicas that train on their own, and meet every few steps."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.components.ranges import Fraction, Positive, Range


@dataclass(frozen=True, kw_only=True)
class DilocoConfig:
    """Replicas that train on their own, with outer steps (DiLoCo)."""

    every: Annotated[int, Range(1, 1_000_000, 50)]
    """Inner steps between the outer steps of a weight (H)."""
    outer_learning_rate: Positive = 0.7
    """Learning rate of the outer step. 1, without momentum, averages the replicas' weights."""
    outer_momentum: Fraction = 0.9
    """Nesterov momentum of the outer step. 0: none."""
    fragments: Annotated[int, Range(1, 10_000)] = 1
    """Groups of layers that have their outer steps in turn, every / fragments steps apart
    (Streaming DiLoCo), so that less is sent at a time. 1: all weights at once."""
    outer_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which replicas exchange outer gradients. They are summed in float32."""
    overlap: Annotated[int, Range(0, 1_000_000)] = 0
    """Inner steps during which replicas exchange a fragment's outer gradient (tau), a part in each.
    It is applied after them. 0: outer steps are taken at once, between inner steps."""
    mixing: Fraction = 0.5
    """Share of its own weights that a replica keeps when an overlapped outer step is applied
    (alpha). 0: it starts from the outer weights, and loses what it learned meanwhile."""
