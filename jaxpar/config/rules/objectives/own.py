"""Rules about losses, probes and post-updates of users."""

import dataclasses
from typing import Any

from jaxpar.config import Config, default_of, flag, require, value_of
from jaxpar.config.errors import ConfigError
from jaxpar.config.values import SavedValue, class_name

LOSS = "train.loss"

#: Fields that mean something else than a loss of tokens, or a term that such a loss has itself.
REFUSED = {
    "dpo.beta": "trains a loss of pairs",
    "distill.teacher": "trains a loss of its own",
    "train.z_loss": "is a term of the default loss: add one of scores.logsumexp() to yours",
    "train.z_loss_schedule": "is a term of the default loss",
}


def own_loss(cfg: Config) -> None:
    """Check that a loss of tokens is the only loss, and that its terms are in the config."""
    loss = cfg.train.loss
    if loss is None:
        return
    for path, rule in REFUSED.items():
        default = default_of(path)
        rule = f"{rule}, and {LOSS} is {class_name(loss)}"
        require(value_of(cfg, path) == default, cfg, path, rule, flag(path, default))
    if isinstance(loss, SavedValue):
        return
    for name in ("mtp_loss", "balance_loss", "balance_over", "router_z_loss"):
        value, default = getattr(loss, name), _default(loss, name)
        if value != default:
            field = f"{LOSS}: {type(loss).__name__}.{name}"
            fix = f"use {flag(f'train.{name}', value)}"
            raise ConfigError(field, value, f"is train.{name} in a run", fix)


def _default(value: Any, name: str) -> object:
    return next(field.default for field in dataclasses.fields(value) if field.name == name)
