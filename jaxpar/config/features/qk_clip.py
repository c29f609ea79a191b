"""QK-clip."""

from jaxpar.config import Config, flag, require
from jaxpar.config.features import Declaration

PATH = "optimizer.qk_clip"


def rule(cfg: Config) -> None:
    """Check the threshold of QK-clip."""
    ways = flag(PATH, 100.0), flag(PATH, 0.0)
    require(cfg.optimizer.qk_clip >= 0, cfg, PATH, "must not be negative", *ways)


DECLARATION = Declaration(switch=PATH, rule=rule, reads_scores=True, scopes=("qk_clip",))
