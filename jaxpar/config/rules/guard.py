"""The rules about what happens when numbers go wrong."""

import math

from jaxpar.config import Config, flag, require

#: Of float16's loss: a larger one would itself overflow float16, half-way through a model.
MAX_LOSS_SCALE = 2.0**24


def guards(cfg: Config) -> None:
    """Guards have what they need to act."""
    g, path = cfg.guard, "guard.loss_scale"
    rule = f"must be a power of two from 1 to {MAX_LOSS_SCALE:.0f}: it rounds nothing, and fits"
    in_range = 1 <= g.loss_scale <= MAX_LOSS_SCALE
    ok = in_range and math.frexp(g.loss_scale)[0] == 0.5
    nearest = 2.0 ** round(math.log2(g.loss_scale)) if in_range else 65536.0
    require(ok, cfg, path, rule, flag(path, nearest))
    rule = "goes back to a checkpoint, and checkpoint.every is 0"
    ok = g.spike != "rewind" or cfg.checkpoint.every > 0
    ways = flag("checkpoint.every", 500), flag("guard.spike", "tell")
    require(ok, cfg, "guard.spike", rule, *ways)
    path, rule = "model.matmul_dtype", "float8 scales its own operands, for bfloat16 or float32"
    ok = cfg.model.matmul_dtype != "float8" or cfg.model.dtype != "float16"
    require(ok, cfg, path, rule, flag("model.dtype", "bfloat16"), flag(path, "compute"))
