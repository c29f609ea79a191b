"""Rules about µP, the maximal update parametrization."""

from jaxpar.components.sizes import d_ff, head_dim
from jaxpar.config import Config, flag, require, value_of

SECTION = "model.mup"


def mup(cfg: Config) -> None:
    """Check the sizes of the base model."""
    m = cfg.model
    if m.mup is None:
        return
    sizes = {"base_width": m.d_model, "base_d_ff": d_ff(m)}
    sizes |= {"base_head_dim": head_dim(m), "base_depth": m.num_layers}
    for name, size in sizes.items():
        path = f"{SECTION}.{name}"
        given = value_of(cfg, path)
        require(given is None or given >= 1, cfg, path, "must be at least 1", flag(path, size))
