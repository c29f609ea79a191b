"""Rules about QK-clip, and the models and layouts that it is not for."""

from jaxpar.config import Config, flag, require, value_of

PATH = "optimizer.qk_clip"

#: Fields that must have this value, and why.
PLAIN = {
    "model.qk_norm": (False, "normalizes queries and keys, whatever the size of their matrices"),
    "model.attention": ("softmax", "has logits that QK-clip does not know"),
    "model.layer_pattern": ("", "has layers of several kinds"),
    "model.mtp_depth": (0, "has modules, whose attention is not clipped"),
    "lora.rank": (0, "trains adapters alone"),
}


def qk_clip(cfg: Config) -> None:
    """Check the threshold of QK-clip, and that the model's logits can be clipped."""
    none = flag(PATH, 0.0)
    require(cfg.optimizer.qk_clip >= 0, cfg, PATH, "must not be negative", flag(PATH, 100.0), none)
    if cfg.optimizer.qk_clip == 0:
        return
    for path, (value, why) in PLAIN.items():
        rule = f"{why}: not supported with {PATH} = {cfg.optimizer.qk_clip}"
        require(value_of(cfg, path) == value, cfg, path, rule, none, flag(path, value))
    path, dense = "parallel.pipeline", cfg.model.dense_layers
    rule = f"puts model.dense_layers = {dense} before the stages, where {PATH} is not supported"
    ok = cfg.parallel.pipeline == 1 or not dense
    require(ok, cfg, path, rule, flag(path, 1), none)
