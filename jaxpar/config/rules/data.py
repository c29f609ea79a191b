"""Rules about the data sources."""

from jaxpar.config import Config, flag, require
from jaxpar.config.lists.mixture import shares, stages


def data(cfg: Config) -> None:
    """Check the names of the sources, without opening them."""
    paths = [share.path for share in shares(cfg)]
    twice = next((path for path in paths if paths.count(path) > 1), "")
    rule = f"contains {twice} twice"
    require(not twice, cfg, "data.mixture", rule, flag("data.mixture", f"{twice}:1"))
    stages(cfg)
    path, eos = "data.eos_id", cfg.data.eos_id
    rule = "must not be negative, or must be None for files that mark documents"
    require(eos is None or eos >= 0, cfg, path, rule, flag(path, None))
