"""The order in which a sequence axis stores tokens."""

from jaxpar.config.schema import Config


def in_zigzag_order(cfg: Config) -> bool:
    """Return whether a sequence axis stores tokens in zigzag order.

    The order balances the work of causal attention. A recurrent layer needs text order, in which a
    device's tokens follow those of the device before.
    """
    return cfg.parallel.context != "ulysses" and not cfg.model.recurrent
