"""The rules about where tokens come from."""

from jaxpar.config import Config, flag, require
from jaxpar.config.mixture import shares


def data(cfg: Config) -> None:
    """Whether the sources are named as they must be; none of them is opened."""
    paths = [share.path for share in shares(cfg)]
    twice = next((path for path in paths if paths.count(path) > 1), "")
    rule = f"names {twice} twice"
    require(not twice, cfg, "data.mixture", rule, flag("data.mixture", f"{twice}:1"))
    path, eos = "data.eos_id", cfg.data.eos_id
    rule = "must not be negative; None for files that need none"
    require(eos is None or eos >= 0, cfg, path, rule, flag(path, None))
