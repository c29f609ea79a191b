"""The moving average of the weights (EMA)."""

from jaxpar.config import Config, flag, require
from jaxpar.config.features import Declaration

DECAY, DTYPE = "optimizer.ema_decay", "optimizer.ema_dtype"


def rule(cfg: Config) -> None:
    """Check that a dtype of the moving average has an average."""
    broken = f"has no effect: there is no moving average, because {DECAY} is 0"
    ok = cfg.optimizer.ema_dtype == "float32" or cfg.optimizer.ema_decay > 0
    require(ok, cfg, DTYPE, broken, flag(DECAY, 0.999), flag(DTYPE, "float32"))


DECLARATION = Declaration(switch=DECAY, rule=rule, has_state=True, storage=(DTYPE,))
