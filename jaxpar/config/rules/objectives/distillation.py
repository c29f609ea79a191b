"""Rules about distillation."""

from jaxpar.config import Config, default_of, flag, require, value_of

TEACHER = "distill.teacher"
OTHERS = ("distill.cache", "distill.weight", "distill.temperature", "distill.top_k")


def distillation(cfg: Config) -> None:
    """Check the fields of distillation."""
    d = cfg.distill
    if not d.teacher:
        for path in OTHERS:
            default = default_of(path)
            rule = f"needs a teacher, but {TEACHER} is empty"
            ways = flag(path, default), flag(TEACHER, "runs/teacher")
            require(value_of(cfg, path) == default, cfg, path, rule, *ways)
        return
    path, vocab = "distill.top_k", cfg.model.vocab_size
    rule = f"must be from 1 to model.vocab_size = {vocab}"
    require(1 <= d.top_k <= vocab, cfg, path, rule, flag(path, min(64, vocab)))
