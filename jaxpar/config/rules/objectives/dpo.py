"""Rules about preference tuning, and what it is not combined with."""

from jaxpar.config import Config, default_of, flag, require, value_of

BETA, SMOOTHING = "dpo.beta", "dpo.label_smoothing"

#: Fields with another value than this have no meaning for the loss of pairs.
PLAIN = {
    "data.mixture": "is not supported for pairs",
    "data.loss_on": "has no effect: the loss of pairs is on the responses",
    "train.z_loss": "is not supported beside the loss of pairs",
    "train.z_loss_schedule": "is not supported beside the loss of pairs",
    "train.batch_schedule": "is not supported for pairs",
    "data.length_schedule": "is not supported for pairs: a sequence holds whole pairs",
    "train.num_epochs": "is not supported for pairs: set train.num_steps",
    "model.mtp_depth": "is not supported beside the loss of pairs",
}


def dpo(cfg: Config) -> None:
    """Check the preference loss, and that everything else fits it."""
    none = flag(BETA, 0.0)
    require(cfg.dpo.beta >= 0, cfg, BETA, "must not be negative", flag(BETA, 0.1), none)
    if cfg.dpo.beta == 0:
        for path in (SMOOTHING, "dpo.too_long"):
            default = default_of(path)
            rule = f"needs the loss of pairs, but {BETA} is 0"
            ways = flag(path, default), flag(BETA, 0.1)
            require(value_of(cfg, path) == default, cfg, path, rule, *ways)
        return
    ok = 0 <= cfg.dpo.label_smoothing < 0.5
    require(ok, cfg, SMOOTHING, "must be at least 0 and below 0.5", flag(SMOOTHING, 0.0))
    path = "data.document_mask"
    rule = f"must be True with {BETA}: the two responses of a pair are documents of one sequence"
    require(cfg.data.document_mask, cfg, path, rule, flag(path, True), none)
    for path, rule in PLAIN.items():
        default = default_of(path)
        rule = f"{rule}, and {BETA} is {cfg.dpo.beta}"
        require(value_of(cfg, path) == default, cfg, path, rule, flag(path, default), none)
