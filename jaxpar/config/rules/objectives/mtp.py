"""Rules about multi-token prediction, and about the weights of losses by step."""

from jaxpar.components.recurrent import Recurrent
from jaxpar.config import Config, default_of, flag, require, value_of
from jaxpar.config.layout.composition import layer_of_modules
from jaxpar.config.lists.weight_schedules import CONSTANT, MTP_LOSS, corners

DEPTH, WEIGHT = "model.mtp_depth", "train.mtp_loss"

#: Most modules (`model/mtp/parameters.py`).
MAX_DEPTH = 8


def weights_by_step(cfg: Config) -> None:
    """Check the schedules of the weights of losses."""
    for path, constant in CONSTANT.items():
        default, value = default_of(constant), value_of(cfg, constant)
        rule = f"has no effect beside {path}, which is set"
        ok = not corners(cfg, path) or value == default
        require(ok, cfg, constant, rule, flag(constant, default), flag(path, ""))


def multi_token_prediction(cfg: Config) -> None:
    """Check the modules of multi-token prediction and the weight of their losses."""
    m = cfg.model
    none = flag(DEPTH, 0)
    weights_by_step(cfg)
    if m.mtp_depth == 0:
        said = f"needs modules of multi-token prediction, but {DEPTH} is 0"
        ways = flag(MTP_LOSS, ""), flag(DEPTH, 1)
        require(not cfg.train.mtp_loss_schedule, cfg, MTP_LOSS, said, *ways)
        default = default_of(WEIGHT)
        rule = f"needs modules of multi-token prediction, but {DEPTH} is 0"
        ok = value_of(cfg, WEIGHT) == default
        require(ok, cfg, WEIGHT, rule, flag(WEIGHT, default), flag(DEPTH, 1))
        return
    rule = f"must be at most {MAX_DEPTH}, and below data.seq_len = {cfg.data.seq_len}"
    require(m.mtp_depth <= min(MAX_DEPTH, cfg.data.seq_len - 1), cfg, DEPTH, rule, flag(DEPTH, 1))
    require(cfg.train.mtp_loss > 0, cfg, WEIGHT, f"must be above 0, or {DEPTH} 0", none)
    said = f"does not support {DEPTH}, which is {m.mtp_depth}"
    require(cfg.lora.rank == 0, cfg, "lora.rank", said, flag("lora.rank", 0), none)
    last = layer_of_modules(m).mixer
    rule = f"needs a last layer without a recurrence: modules are as it, with {type(last).__name__}"
    require(not isinstance(last, Recurrent), cfg, DEPTH, rule, none)
    path, rule = "model.logits_scaling", f"{said}: modules read what the head reads, unscaled"
    require(m.logits_scaling == 1, cfg, path, rule, flag(path, 1.0), none)
