"""Which backend computes a recurrence: what the kernels support, and where they were measured."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxpar.kernels.platform import Platform, triton_missing


@dataclass(frozen=True)
class Shape:
    """What a backend must support.

    C tokens of a chunk. A state is [K, V]. dtype of queries, keys and values.
    """

    C: int
    K: int
    V: int
    dtype: str

    @staticmethod
    def of(k: Any, v: Any, size: int) -> "Shape":
        """Return the shape of a call with keys [..., K] and values [..., V]."""
        return Shape(size, k.shape[-1], v.shape[-1], jnp.dtype(k.dtype).name)


@dataclass(frozen=True)
class TritonLimits:
    """The requests that the Triton kernels support.

    compute_capability   The least NVIDIA compute capability.
    not_for              The compute capabilities with this beginning are refused.
    dtypes               Dtypes of queries, keys and values.
    chunks               Tokens of a chunk.
    keys                 Widths K of keys.
    value_multiple       Widths V of values are multiples of this.
    """

    compute_capability: str
    not_for: str
    dtypes: tuple[str, ...]
    chunks: tuple[int, ...]
    keys: tuple[int, ...]
    value_multiple: int


#: Sizes whose tiles fit into registers and shared memory, by compiling them for Hopper. For data-
#: center Blackwell, Triton 3.6 and 3.9 stop in `recurrence_gradients`, at an assertion of theirs.
TRITON = TritonLimits("9.0", "10.", ("bfloat16",), (32, 64), (64, 128), 64)

#: Kinds of GPUs on which `scripts/measure/recurrence_table.py` found the kernels faster than the
#: reference, forward and backward (docs/experiments.md).
MEASURED_FASTER: tuple[str, ...] = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")


def refusal(shape: Shape, platform: Platform | None = None) -> str | None:
    """Return why the Triton kernels cannot compute a recurrence, or None if they can.

    Args:     platform: defaults to this process's platform.
    """
    here = Platform.here() if platform is None else platform
    least = TRITON.compute_capability
    if here.name != "gpu" or float(here.compute_capability or 0) < float(least):
        there = here.compute_capability or f"platform {here.name}"
        return f"it needs compute capability {least} (Hopper) or later, not {there}"
    if missing := triton_missing(here):
        return missing
    if here.compute_capability.startswith(TRITON.not_for):
        return f"Triton stops at a kernel for compute capability {here.compute_capability}"
    if shape.dtype not in TRITON.dtypes:
        return f"it supports {' or '.join(TRITON.dtypes)}, not {shape.dtype}"
    for what, found, able in (("chunks", shape.C, TRITON.chunks), ("keys", shape.K, TRITON.keys)):
        if found not in able:
            return f"{what} must have a size of {' or '.join(map(str, able))}, not {found}"
    if shape.V % TRITON.value_multiple:
        return f"values must be a multiple of {TRITON.value_multiple} wide, not {shape.V}"
    return None


def choose(backend: str, shape: Shape, platform: Platform | None = None) -> str:
    """Return the backend of a call, "triton" or "reference".

    Args:     backend: "auto" or a name. "auto" is the kernels where they can compute the call and
              were measured to be faster, else the reference. platform: as `refusal`.
    Raises:   ValueError for an unknown backend, and for kernels that cannot compute the call.
    """
    here = Platform.here() if platform is None else platform
    if backend == "reference":
        return backend
    if backend not in ("auto", "triton"):
        names = "auto, reference, triton"
        raise ValueError(f"recurrent backend {backend!r}: must be one of {names}")
    why = refusal(shape, here)
    if backend == "auto":
        return "triton" if why is None and here.kind in MEASURED_FASTER else "reference"
    if why is not None:
        raise ValueError(f"recurrent backend 'triton': {why}. Backends that can: reference.")
    return backend
