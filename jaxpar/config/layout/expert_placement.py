"""On which devices a layer's experts are: those of the expert axis, or of tensor ranks too."""

from jaxpar.config.schema import ParallelConfig


def spreads_experts(p: ParallelConfig) -> bool:
    """Return whether tensor ranks have different experts, rather than parts of the same ones."""
    return p.expert_tensor == 1 and p.tensor > 1


def expert_ways(p: ParallelConfig) -> int:
    """Return the number of devices over which a layer's experts are divided."""
    return p.expert * p.tensor if spreads_experts(p) else p.expert


def expert_parts(p: ParallelConfig) -> int:
    """Return the number of devices over which each expert is split."""
    return 1 if spreads_experts(p) else p.tensor


def token_ways(p: ParallelConfig) -> int:
    """Return over how many devices a layer with experts divides the tokens of a sequence."""
    return p.sequence * (p.tensor if spreads_experts(p) else 1)
