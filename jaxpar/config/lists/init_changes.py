"""The fields of layers that may differ from those of initial weights, `run.init_changes`."""

from jaxpar.config.schema import Config

#: Its names, and the field of a layer that each stands for.
CHANGEABLE = {
    "rope_theta": "mixer.rope.theta",
    "rope_scaling": "mixer.rope.scaling",
    "local_rope_theta": "mixer.rope.theta",
    "local_rope_scaling": "mixer.rope.scaling",
    "sliding_window": "mixer.window",
}


def may_change(cfg: Config, path: str) -> bool:
    """Return whether `run.init_changes` names the field at an address, or one that it is in."""
    named = [CHANGEABLE[name] for name in cfg.run.init_changes.split(",") if name in CHANGEABLE]
    within = f"{path.split('.', 2)[-1]}."
    return any(within.startswith(f"{field}.") for field in named)
