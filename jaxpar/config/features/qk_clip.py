"""QK-clip, and the models and layouts that it is not for."""

from jaxpar.config import Config, flag, require
from jaxpar.config.features import Declaration

PATH = "optimizer.qk_clip"

#: Fields that must have this value, and why.
NEEDS = {
    "model.qk_norm": (False, "normalizes queries and keys, whatever the size of their matrices"),
    "model.attention": ("softmax", "has logits that QK-clip does not know"),
    "model.layer_pattern": ("", "has layers of several kinds"),
    "model.mtp_depth": (0, "has modules, whose attention is not clipped"),
    "lora.rank": (0, "trains adapters alone"),
    "diloco.every": (0, "has replicas, of which it would take the largest logits of all"),
    "optimizer.offload_masters": (False, "has the weights that it scales in host memory"),
}


def rule(cfg: Config) -> None:
    """Check the threshold of QK-clip, and that the model's logits can be clipped."""
    none = flag(PATH, 0.0)
    require(cfg.optimizer.qk_clip >= 0, cfg, PATH, "must not be negative", flag(PATH, 100.0), none)
    if cfg.optimizer.qk_clip == 0:
        return
    path, dense = "parallel.pipeline", cfg.model.dense_layers
    broken = f"puts model.dense_layers = {dense} before the stages, where {PATH} is not supported"
    ok = cfg.parallel.pipeline == 1 or not dense
    require(ok, cfg, path, broken, flag(path, 1), none)


DECLARATION = Declaration(
    switch=PATH, needs=NEEDS, rule=rule, reads_scores=True, scopes=("qk_clip",)
)
