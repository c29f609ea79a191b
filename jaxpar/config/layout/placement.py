"""Which devices have which experts, and in which order a sequence axis stores tokens."""

from jaxpar.config.schema import Config, ParallelConfig


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


def in_zigzag_order(cfg: Config) -> bool:
    """Return whether a sequence axis stores tokens in zigzag order.

    The order balances the work of causal attention. A recurrent layer needs text order, in which a
    device's tokens follow those of the device before.
    """
    return cfg.parallel.context != "ulysses" and not cfg.model.recurrent
