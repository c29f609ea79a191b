"""Rules about the numbers of DiLoCo."""

from jaxpar.config import Config, DilocoConfig, default_of, flag, require
from jaxpar.config.layout.layer_split import is_equal

PATH = "diloco.every"


def diloco(cfg: Config) -> None:
    """Check the numbers of DiLoCo, and that replicas can train on their own."""
    d = cfg.diloco
    if d is None:
        return
    none, path = flag("diloco", None), "parallel.replica"
    rule = f"must be at least 2 with {PATH} = {d.every}: replicas train on their own"
    require(cfg.parallel.replica > 1, cfg, path, rule, flag(path, 2), none)
    path, rule = "model.num_layers", "must be a multiple of parallel.pipeline = "
    rule += f"{cfg.parallel.pipeline} with {PATH} = {d.every}"
    require(is_equal(cfg), cfg, path, rule, flag("parallel.pipeline", 1), none)
    _fragments(cfg, d)
    _overlap(cfg, d)


def _fragments(cfg: Config, d: DilocoConfig) -> None:
    """Check that fragments have whole steps between them, and as many layers each."""
    n, path, whole = d.fragments, "diloco.fragments", flag("diloco.fragments", 1)
    rule = f"must divide {PATH} = {d.every}"
    require(d.every % n == 0, cfg, path, rule, whole, flag(PATH, n))
    here = cfg.model.num_layers // cfg.parallel.pipeline
    rule = f"must divide the {here} layers of a stage"
    fits = [k for k in range(n, 0, -1) if here % k == 0 and d.every % k == 0]
    require(here % n == 0, cfg, path, rule, *(flag(path, k) for k in fits[:1]))


def _overlap(cfg: Config, d: DilocoConfig) -> None:
    """Check that an exchange ends before the next one begins, and that its share is one."""
    path, most = "diloco.overlap", d.every // d.fragments
    rule = f"must be at most {most}, the steps from a fragment's outer step to the next one's"
    ways = [flag("diloco.fragments", 1)] if d.overlap <= d.every else []
    require(d.overlap <= most, cfg, path, rule, flag(path, most), *ways)
    path = "diloco.mixing"
    rule = "has no effect, because diloco.overlap is 0"
    ok, ways = d.overlap or d.mixing == default_of(path), [flag("diloco.overlap", 1)]
    require(bool(ok), cfg, path, rule, *ways, flag(path, default_of(path)))
