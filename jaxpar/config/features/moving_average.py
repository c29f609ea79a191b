"""The moving average of the weights (EMA)."""

from jaxpar.config import Config, flag, require
from jaxpar.config.features import Declaration

DECAY, DTYPE = "optimizer.ema_decay", "optimizer.ema_dtype"

#: Fields that must have this value, and why.
NEEDS = {
    "diloco.every": (0, "has steps that do not change the weights to average"),
    "optimizer.offload_masters": (False, "has the weights to average in host memory"),
}


def rule(cfg: Config) -> None:
    """Check that a dtype of the moving average has an average."""
    broken = f"has no effect: there is no moving average, because {DECAY} is 0"
    ok = cfg.optimizer.ema_dtype == "float32" or cfg.optimizer.ema_decay > 0
    require(ok, cfg, DTYPE, broken, flag(DECAY, 0.999), flag(DTYPE, "float32"))


DECLARATION = Declaration(
    switch=DECAY, needs=NEEDS, rule=rule, has_state=True, shares=(DECAY,), storage=(DTYPE,)
)
