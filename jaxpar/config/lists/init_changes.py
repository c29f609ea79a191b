"""The fields of layers that may differ from those of initial weights, `run.init_changes`."""

from jaxpar.config.schema import Config


def may_change(cfg: Config, path: str) -> bool:
    """Return whether `run.init_changes` names the field at an address, or a part that it is in."""
    within = f"{path.split('.', 2)[-1]}."
    return any(within.startswith(f"{field}.") for field in cfg.run.init_changes)
