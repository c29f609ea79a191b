"""What a layer costs, in the units of `Component`'s methods."""

from typing import NamedTuple


class Projection(NamedTuple):
    """`times` matmuls of [tokens * share, inner] x [inner, out] on one tensor rank."""

    inner: float
    out: float
    times: int = 1
    share: float = 1.0


class Widths(NamedTuple):
    """Values per token of a mixer's arrays on one tensor rank. Only softmax attention has queries
    and keys.

    value     of values; without attention, of all projections of the input.
    kept      what the backward reads of the projections, without queries.
    latents   of projections of a rank's own tokens, which it gathers; complete on each rank.
    """

    query: float
    key: float
    value: float
    out: float
    kept: float
    latents: float


#: Those of a layer without a mixer.
NO_WIDTHS = Widths(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Heads(NamedTuple):
    """The heads of softmax attention, and what else a kernel of it must support."""

    queries: int
    keys: int
    key_dim: int
    value_dim: int
    softcap: float | None = None
    """Cap of the magnitude of scores."""
    is_own: bool = False
    """Whether a user's function is in place of the softmax: kernels of it are unknown."""
