"""Block sizes of the Triton kernels: the tunable sizes and their defaults.

A block is (rows of queries) x (rows of keys), both powers of two of at least 16.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TritonForward:
    """Block sizes of the forward.

    q: query rows per program. kv: key rows per step. warps: per program. stages: of the pipeline
    of loads. overlap: multiply the weights of one step while those of the next are computed.
    """

    q: int = 128
    kv: int = 64
    warps: int = 8
    stages: int = 3
    overlap: bool = True


@dataclass(frozen=True)
class TritonBackward:
    """Block sizes of the backward's two kernels: of dk and dv, and (`dq_`) of dq.

    q: query rows per step. kv: key rows per program. dq_q: query rows per program. dq_kv: key rows
    per step. *warps: per program. *stages: of the pipeline of loads. dq_overlap: multiply the
    gradients of one step's scores while those of the next are computed.
    """

    q: int = 64
    kv: int = 128
    warps: int = 8
    stages: int = 2
    dq_q: int = 128
    dq_kv: int = 64
    dq_warps: int = 8
    dq_stages: int = 2
    dq_overlap: bool = False


def default_forward(head_dim: int, capability: str = "9.0") -> TritonForward:
    """Return the block sizes for shapes without a measurement."""
    return TritonForward()


def default_backward(head_dim: int, capability: str = "9.0") -> TritonBackward:
    """Return the block sizes for shapes without a measurement."""
    return TritonBackward()
