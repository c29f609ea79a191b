"""The rules about what happens when numbers go wrong."""

import math

from jaxpar.config import Config, flag, require


def guards(cfg: Config) -> None:
    """Guards have what they need to act."""
    g, path = cfg.guard, "guard.loss_scale"
    rule = "must be a power of two of at least 1, so that it rounds nothing"
    ok = g.loss_scale >= 1 and math.frexp(g.loss_scale)[0] == 0.5
    nearest = 2.0 ** round(math.log2(g.loss_scale)) if g.loss_scale >= 1 else 65536.0
    require(ok, cfg, path, rule, flag(path, nearest))
    rule = "goes back to a checkpoint, and checkpoint.every is 0"
    ok = g.spike != "rewind" or cfg.checkpoint.every > 0
    ways = flag("checkpoint.every", 500), flag("guard.spike", "tell")
    require(ok, cfg, "guard.spike", rule, *ways)
    path, rule = "model.matmul_dtype", "float8 scales its own operands, for bfloat16 or float32"
    ok = cfg.model.matmul_dtype != "float8" or cfg.model.dtype != "float16"
    require(ok, cfg, path, rule, flag("model.dtype", "bfloat16"), flag(path, "compute"))
