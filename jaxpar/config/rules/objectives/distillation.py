"""Rules about distillation."""

from jaxpar.config import Config, default_of, flag, require
from jaxpar.config.fields import turning_off


def distillation(cfg: Config) -> None:
    """Check the fields of distillation."""
    d, path = cfg.distill, "distill.teacher"
    if d is None:
        return
    ways = flag(path, default_of(path)), *turning_off(path)
    require(bool(d.teacher), cfg, path, "must name the run of a teacher", *ways)
    path, vocab = "distill.top_k", cfg.model.vocab_size
    rule = f"must be from 1 to model.vocab_size = {vocab}"
    require(1 <= d.top_k <= vocab, cfg, path, rule, flag(path, min(64, vocab)))
