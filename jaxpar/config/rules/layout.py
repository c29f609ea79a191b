"""Rules about the layout, which the config sets or the planner chooses for the devices.

A layout is the mesh and the fields of `parallel` that depend on it.
"""

from jaxpar.config import Config, flag, require
from jaxpar.config.layout_fields import ALL, FIELDS, names_of


def automatic(cfg: Config) -> None:
    """Check that `parallel.auto` names fields of a layout."""
    wrong = [name for name in names_of(cfg.parallel.auto) if name not in (ALL, *FIELDS)]
    rule = f"must be {ALL}, or names from {', '.join(FIELDS)}, not {', '.join(wrong)}"
    path = "parallel.auto"
    require(not wrong, cfg, path, rule, flag(path, ALL), flag(path, "data,num_microbatches"))


def interleaving(cfg: Config) -> None:
    """Check that virtual stages have a pipeline, and a schedule that interleaves them."""
    p, path = cfg.parallel, "parallel.virtual_stages"
    rule = "needs a pipeline, but parallel.pipeline is 1"
    ways = flag(path, 1), flag("parallel.pipeline", 2)
    require(p.virtual_stages == 1 or p.pipeline > 1, cfg, path, rule, *ways)
    rule = "must be 1 with parallel.schedule gpipe"
    ways = flag(path, 1), flag("parallel.schedule", "1f1b")
    require(p.virtual_stages == 1 or p.schedule != "gpipe", cfg, path, rule, *ways)


def turns(cfg: Config) -> None:
    """Check that row groups have unrolled layers."""
    p, path = cfg.parallel, "parallel.row_groups"
    rule = "needs unrolled layers, but parallel.layer_loop is scan"
    ways = flag(path, 1), flag("parallel.layer_loop", "unroll")
    require(p.row_groups == 1 or p.layer_loop == "unroll", cfg, path, rule, *ways)
