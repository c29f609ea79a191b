"""Block sizes of the Hopper kernels: the tunable sizes and their defaults.

A block is (rows of queries) x (rows of keys) processed by one CTA, which has two consumer
warpgroups and a producer. Tuned sizes come from the table of measurements
(`kernels/attention/choice.py`). Shapes without a measurement use `default_forward` and
`default_backward`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardBlocks:
    """Block sizes of the forward.

    q: query rows per CTA, 64 per consumer. kv: key rows per step. stages: number of K/V buffers.
    heads: number of KV heads whose tiles are processed at a time and share the L2 cache; 0: all.
    """

    q: int = 128
    kv: int = 128
    stages: int = 2
    heads: int = 0


@dataclass(frozen=True)
class BackwardBlocks:
    """Block sizes of the backward.

    q: query rows per step. kv: key rows per CTA. stages: number of Q/dO buffers. heads: as in the
    forward, but increased until nearly every multiprocessor has a tile.
    """

    q: int = 64
    kv: int = 128
    stages: int = 2
    heads: int = 0


@dataclass(frozen=True)
class DqBlocks:
    """Block sizes of the dq kernel.

    q: query rows per CTA. kv: key rows per step. stages: number of K/V buffers.
    """

    q: int = 128
    kv: int = 64
    stages: int = 2


def forward_candidates(head_dim: int) -> list[ForwardBlocks]:
    """Return the block sizes that the tuner tries for a head dim, starting with the default."""
    by_dim = {
        64: [
            ForwardBlocks(kv=128, stages=4),
            ForwardBlocks(kv=128, stages=3),
            ForwardBlocks(kv=128, stages=2),
            ForwardBlocks(kv=128, stages=4, heads=1),
            ForwardBlocks(kv=64, stages=4),
        ],
        128: [
            ForwardBlocks(kv=128, stages=2),
            ForwardBlocks(kv=128, stages=2, heads=1),
            ForwardBlocks(kv=64, stages=4),
        ],
        256: [ForwardBlocks(kv=64, stages=2)],
    }
    return by_dim[head_dim]


def backward_candidates(head_dim: int) -> list[BackwardBlocks]:
    """Return the block sizes that the tuner tries for a head dim, starting with the default."""
    by_dim = {
        64: [BackwardBlocks(q=128, stages=2, heads=n) for n in (1, 0)],
        128: [BackwardBlocks(q=64, stages=2, heads=n) for n in (0, 1, 2)],
        256: [BackwardBlocks(q=64, stages=1)],
    }
    return by_dim[head_dim]


def default_forward(head_dim: int) -> ForwardBlocks:
    """Return the block sizes for shapes without a measurement."""
    return forward_candidates(head_dim)[0]


def default_backward(head_dim: int) -> BackwardBlocks:
    """Return the block sizes for shapes without a measurement."""
    return backward_candidates(head_dim)[0]


def dq_blocks(head_dim: int) -> DqBlocks:
    """Return the block sizes of the dq kernel, which are not tuned.

    At head dim 256, shared memory has room for only one buffer.
    """
    return DqBlocks(stages=1 if head_dim == 256 else 2)
