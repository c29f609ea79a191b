"""The rules about who chooses a layout: the config, or the planner for the devices that are there.

A layout is the mesh, and the fields of `parallel` that go with it.
"""

from jaxpar.config import Config, flag, require
from jaxpar.config.layout_fields import ALL, FIELDS, names_of


def automatic(cfg: Config) -> None:
    """What the planner is to choose are fields of a layout."""
    wrong = [name for name in names_of(cfg.parallel.auto) if name not in (ALL, *FIELDS)]
    rule = f"must be {ALL}, or names of {', '.join(FIELDS)}: {', '.join(wrong)} is none"
    path = "parallel.auto"
    require(not wrong, cfg, path, rule, flag(path, ALL), flag(path, "data,num_microbatches"))


def interleaving(cfg: Config) -> None:
    """Virtual stages are of a pipeline."""
    p, path = cfg.parallel, "parallel.virtual_stages"
    rule = "interleaves a pipeline, and parallel.pipeline is 1"
    ways = flag(path, 1), flag("parallel.pipeline", 2)
    require(p.virtual_stages == 1 or p.pipeline > 1, cfg, path, rule, *ways)


def turns(cfg: Config) -> None:
    """Rows take turns in unrolled layers alone."""
    p, path = cfg.parallel, "parallel.row_groups"
    rule = "needs unrolled layers, and parallel.layer_loop is scan"
    ways = flag(path, 1), flag("parallel.layer_loop", "unroll")
    require(p.row_groups == 1 or p.layer_loop == "unroll", cfg, path, rule, *ways)
