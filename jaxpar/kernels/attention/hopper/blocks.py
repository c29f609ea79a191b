"""Block sizes of our own kernels: what may be tuned, and the heuristic for what was not.

A block is (rows of queries) x (rows of keys) handled by one CTA of two consumer warpgroups and
one producer. Tuned sizes come from the table of measurements
(`kernels/attention/dispatch/choice.py`); anything not measured uses `default_forward` and
`default_backward`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardBlocks:
    """q: query rows of a CTA, 64 for each consumer. kv: key rows of a step. stages: K/V buffers.
    heads: KV heads whose tiles are worked on at a time, which share the L2 cache; 0: all."""

    q: int = 128
    kv: int = 128
    stages: int = 2
    heads: int = 0


@dataclass(frozen=True)
class BackwardBlocks:
    """q: query rows of a step. kv: key rows of a CTA. stages: Q/dO buffers. heads: as forward, but
    at least as many as give nearly each multiprocessor a tile."""

    q: int = 64
    kv: int = 128
    stages: int = 2
    heads: int = 0


@dataclass(frozen=True)
class DqBlocks:
    """q: query rows of a CTA. kv: key rows of a step. stages: K/V buffers."""

    q: int = 128
    kv: int = 64
    stages: int = 2


def forward_candidates(head_dim: int) -> list[ForwardBlocks]:
    """What the tuner tries for a head dim; the heuristic's choice first."""
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
    """As `forward_candidates`."""
    by_dim = {
        64: [BackwardBlocks(q=128, stages=2, heads=n) for n in (1, 0)],
        128: [BackwardBlocks(q=64, stages=2, heads=n) for n in (0, 1, 2)],
        256: [BackwardBlocks(q=64, stages=1)],
    }
    return by_dim[head_dim]


def default_forward(head_dim: int) -> ForwardBlocks:
    """The sizes for a shape that nobody measured."""
    return forward_candidates(head_dim)[0]


def default_backward(head_dim: int) -> BackwardBlocks:
    """As `default_forward`."""
    return backward_candidates(head_dim)[0]


def dq_blocks(head_dim: int) -> DqBlocks:
    """Of the kernel for dq alone; not tuned. Shared memory holds one buffer at head dim 256."""
    return DqBlocks(stages=1 if head_dim == 256 else 2)
