"""Rules about memory: rematerialization and the storage dtypes of the moments."""

import difflib

from jaxpar.config import Config, flag, require, value_of
from jaxpar.config.remat_policies import (
    LAYER_INPUT,
    ON_HOST,
    REMAT_NAMES,
    REMAT_POLICIES,
    without_mark,
)


def remat(cfg: Config) -> None:
    """Check that `parallel.remat` is a policy or names values that can be saved."""
    path, names = "parallel.remat", cfg.parallel.remat.split(",")
    plain = [without_mark(name) for name in names]
    policy = next((name.strip() for name in names if name.strip() in REMAT_POLICIES), None)
    near = [m for name in plain for m in difflib.get_close_matches(name, REMAT_NAMES, n=1)]
    policies, known = ", ".join(REMAT_POLICIES), ", ".join(REMAT_NAMES)
    rule = f"must be one of {policies}, or names from {known}, separated by commas; {ON_HOST} "
    rule += f"after a name, or after {LAYER_INPUT}, saves the value in host memory"
    ok = cfg.parallel.remat in REMAT_POLICIES or set(plain) <= {*REMAT_NAMES, LAYER_INPUT}
    require(ok, cfg, path, rule, flag(path, policy or ",".join(near) or "dots"))
    rule = f"always saves {LAYER_INPUT}; add {ON_HOST} to save it in host memory"
    on_host = [LAYER_INPUT + ON_HOST if name == LAYER_INPUT else name for name in names]
    require(LAYER_INPUT not in names, cfg, path, rule, flag(path, ",".join(dict.fromkeys(on_host))))
    once = {without_mark(name): name for name in names}
    rule = "must name each value once, on the device or in host memory"
    require(len(once) == len(names), cfg, path, rule, flag(path, ",".join(once.values())))


#: Largest decay at which stochastic rounding to bfloat16 is accurate (docs/numerics.md).
MAX_BFLOAT16_DECAY = 0.999


def moments(cfg: Config) -> None:
    """Check that moments in bfloat16 exist and that their rounding error stays small."""
    o, first, second = (
        cfg.optimizer,
        "optimizer.first_moment_dtype",
        "optimizer.second_moment_dtype",
    )
    rule = f"needs adamw; {o.name} has no second moment"
    ways = flag(second, "float32"), flag("optimizer.name", "adamw")
    require(o.second_moment_dtype == "float32" or o.name == "adamw", cfg, second, rule, *ways)
    # Lion's only moment decays by beta2; beta1 interpolates between it and the gradient.
    betas = {first: "optimizer.beta2" if o.name == "lion" else "optimizer.beta1"}
    for path, beta in (betas | {second: "optimizer.beta2"}).items():
        decay, most = value_of(cfg, beta), MAX_BFLOAT16_DECAY
        rule = f"needs {beta} <= {most}, not {decay}: rounding noise would exceed 5%"
        ok = value_of(cfg, path) == "float32" or decay <= most
        require(ok, cfg, path, rule, flag(path, "float32"), flag(beta, most))
