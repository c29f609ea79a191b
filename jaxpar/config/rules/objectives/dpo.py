"""Rules about preference tuning."""

from jaxpar.config import Config, default_of, flag, require, value_of

BETA, SMOOTHING = "dpo.beta", "dpo.label_smoothing"


def dpo(cfg: Config) -> None:
    """Check the preference loss."""
    if cfg.dpo.beta == 0:
        for path in (SMOOTHING, "dpo.too_long"):
            default = default_of(path)
            rule = f"needs the loss of pairs, but {BETA} is 0"
            ways = flag(path, default), flag(BETA, 0.1)
            require(value_of(cfg, path) == default, cfg, path, rule, *ways)
