"""Rules about multi-token prediction, and about the weights of losses by step."""

from jaxpar.config import Config, default_of, flag, require, value_of
from jaxpar.config.lists.weight_schedules import CONSTANT, MTP_LOSS

DEPTH, WEIGHT = "model.mtp_depth", "train.mtp_loss"

#: Most modules (`model/mtp/parameters.py`).
MAX_DEPTH = 8


def weights_by_step(cfg: Config) -> None:
    """Check that schedules of the weights of losses have some weight above 0."""
    for path in CONSTANT:
        held = value_of(cfg, path)
        ok = not held or any(point.weight for point in held)
        require(ok, cfg, path, "must have a weight above 0", flag(path, ()))


def multi_token_prediction(cfg: Config) -> None:
    """Check the modules of multi-token prediction and the weight of their losses."""
    m = cfg.model
    weights_by_step(cfg)
    if m.mtp_depth == 0:
        said = f"needs modules of multi-token prediction, but {DEPTH} is 0"
        ways = flag(MTP_LOSS, ()), flag(DEPTH, 1)
        require(not cfg.train.mtp_loss_schedule, cfg, MTP_LOSS, said, *ways)
        default = default_of(WEIGHT)
        rule = f"needs modules of multi-token prediction, but {DEPTH} is 0"
        ok = value_of(cfg, WEIGHT) == default
        require(ok, cfg, WEIGHT, rule, flag(WEIGHT, default), flag(DEPTH, 1))
        return
    rule = f"must be at most {MAX_DEPTH}, and below data.seq_len = {cfg.data.seq_len}"
    require(m.mtp_depth <= min(MAX_DEPTH, cfg.data.seq_len - 1), cfg, DEPTH, rule, flag(DEPTH, 1))
    require(cfg.train.mtp_loss > 0, cfg, WEIGHT, f"must be above 0, or {DEPTH} 0", flag(DEPTH, 0))
