"""Block sizes of the Triton kernels: the tunable sizes and their defaults.

A block is (rows of queries) x (rows of keys), both powers of two of at least 16. Tuned sizes come
from the table of measurements (`kernels/attention/choice.py`). Shapes without a
measurement use `default_forward` and `default_backward`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TritonForward:
    """Block sizes of the forward.

    q: query rows per program. kv: key rows per step. warps: per program. stages: of the pipeline
    of loads. overlap: multiply the weights of one step while those of the next are computed.
    heads: number of KV heads whose tiles are computed at a time and share the L2 cache; 0: all.
    """

    q: int = 128
    kv: int = 64
    warps: int = 8
    stages: int = 3
    overlap: bool = False
    heads: int = 0


@dataclass(frozen=True)
class TritonBackward:
    """Block sizes of the backward's two kernels: of dk and dv, and (`dq_`) of dq.

    q: query rows per step. kv: key rows per program. dq_q: query rows per program. dq_kv: key rows
    per step. *warps: per program. *stages: of the pipeline of loads. last_first: the programs of dk
    and dv visit the queries from the last, which all of them see. *heads: as in the forward.
    """

    q: int = 64
    kv: int = 64
    warps: int = 4
    stages: int = 2
    dq_q: int = 64
    dq_kv: int = 64
    dq_warps: int = 4
    dq_stages: int = 2
    last_first: bool = False
    heads: int = 0
    dq_heads: int = 0


#: By largest head dim, for the 227 KiB of shared memory of Hopper and of data-center Blackwell. The
#: first of 64 and of 128 were the fastest at causal shapes on an H100
#: (docs/experiments.md#triton); those of 256 are not measured.
_LARGE_FORWARD = {
    64: [
        TritonForward(128, 64, 8, 3, heads=2),
        TritonForward(128, 64, 4, 3, heads=4),
        TritonForward(64, 64, 4, 3, overlap=True),
    ],
    128: [
        TritonForward(128, 128, 8, 3, overlap=True, heads=2),
        TritonForward(128, 64, 8, 3, heads=2),
        TritonForward(64, 64, 4, 3, overlap=True),
    ],
    256: [
        TritonForward(64, 64, 4, 2),
        TritonForward(128, 32, 8, 2, overlap=True),
        TritonForward(64, 32, 4, 2),
    ],
}
_LARGE_BACKWARD = {
    64: [
        TritonBackward(64, 64, 4, 3, 128, 64, 4, 3, heads=4),
        TritonBackward(128, 64, 4, 2, 64, 64, 4, 2),
        TritonBackward(32, 64, 4, 3, 128, 64, 4, 3),
    ],
    128: [
        TritonBackward(64, 128, 8, 3, 128, 64, 8, 3, last_first=True, heads=2, dq_heads=1),
        TritonBackward(64, 128, 8, 3, 128, 32, 4, 3, last_first=True, heads=4, dq_heads=1),
        TritonBackward(64, 64, 4, 2, 64, 64, 4, 2),
    ],
    256: [
        TritonBackward(32, 64, 8, 2, 64, 32, 4, 2),
        TritonBackward(32, 64, 4, 2, 64, 64, 8, 2),
    ],
}

#: For the 99 KiB of the smallest GPUs since Ampere. Compiled without spilled registers, and not
#: measured.
_SMALL_FORWARD = {
    64: [TritonForward(128, 64, 8, 3), TritonForward(128, 64, 4, 3)],
    128: [TritonForward(128, 64, 8, 2), TritonForward(64, 64, 4, 2)],
    256: [TritonForward(64, 32, 4, 2), TritonForward(32, 32, 4, 2)],
}
_SMALL_BACKWARD = {
    64: [
        TritonBackward(64, 128, 8, 2, 128, 64, 8, 2),
        TritonBackward(64, 64, 4, 2, 64, 64, 4, 2),
    ],
    128: [
        TritonBackward(64, 64, 8, 2, 128, 32, 8, 2),
        TritonBackward(32, 64, 4, 2, 64, 64, 4, 2),
    ],
    256: [TritonBackward(32, 32, 8, 2, 32, 32, 4, 2)],
}


def forward_candidates(head_dim: int, capability: str) -> list[TritonForward]:
    """Return the block sizes that the tuner tries for a head dim, starting with the default.

    Args:     capability: compute capability of the GPU, such as "8.0".
    Returns:  none for a head dim above 256.
    """
    return _of(_LARGE_FORWARD, _SMALL_FORWARD, head_dim, capability)


def backward_candidates(head_dim: int, capability: str) -> list[TritonBackward]:
    """Return the block sizes that the tuner tries for a head dim, starting with the default.

    Args:     as `forward_candidates`.
    """
    return _of(_LARGE_BACKWARD, _SMALL_BACKWARD, head_dim, capability)


def default_forward(head_dim: int, capability: str) -> TritonForward:
    """Return the block sizes for shapes without a measurement."""
    return forward_candidates(head_dim, capability)[0]


def default_backward(head_dim: int, capability: str) -> TritonBackward:
    """Return the block sizes for shapes without a measurement."""
    return backward_candidates(head_dim, capability)[0]


def _of(large: dict, small: dict, head_dim: int, capability: str) -> list:
    major = capability.partition(".")[0]
    table = large if major in ("9", "10") else small
    return next((sizes for most, sizes in table.items() if head_dim <= most), [])
