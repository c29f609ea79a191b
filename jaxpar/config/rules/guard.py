"""Rules about loss scaling and loss spikes."""

import math

from jaxpar.config import Config, flag, require

#: Largest loss scale for float16. A larger one would overflow float16 halfway through a model.
MAX_LOSS_SCALE = 2.0**24


def scales_loss(cfg: Config) -> bool:
    """Return whether the loss is scaled: only in float16, which has a small range of exponents."""
    return cfg.compute.dtype == "float16"


def guards(cfg: Config) -> None:
    """Check the section `guard`."""
    g, path = cfg.guard, "guard.loss_scale"
    rule = f"must be a power of two from 1 to {MAX_LOSS_SCALE:.0f}, to scale without rounding"
    in_range = 1 <= g.loss_scale <= MAX_LOSS_SCALE
    ok = in_range and math.frexp(g.loss_scale)[0] == 0.5
    nearest = 2.0 ** round(math.log2(g.loss_scale)) if in_range else 65536.0
    require(ok, cfg, path, rule, flag(path, nearest))
    rule = "needs checkpoints to return to, but checkpoint.every is 0"
    ok = g.spike != "rewind" or cfg.checkpoint.every > 0
    ways = flag("checkpoint.every", 500), flag("guard.spike", "tell")
    require(ok, cfg, "guard.spike", rule, *ways)
