"""When fragments have their outer steps, and with an overlap, when those begin and end.

Fragments are due in turn, `every / fragments` inner steps apart. With an overlap of K steps, the
outer gradient of a fragment that is due after step t is exchanged during steps t + 1 to t + K, and
applied after the last of them.

Source:   Douillard et al. 2025 (2501.18512), section 2: algorithm 2.
"""

from jaxpar.config import Config, present


def due(done: int, cfg: Config) -> list[int]:
    """Return the fragments that have an outer step after `done` steps, without an overlap.

    After the last step of the run, all of them do: no inner step is lost.
    """
    d = cfg.diloco
    if d is None:
        return []
    if done == cfg.train.num_steps:
        return list(range(d.fragments))
    return [i for i in range(d.fragments) if (done - i * d.every // d.fragments) % d.every == 0]


def begun(done: int, cfg: Config) -> int | None:
    """Return the fragment whose exchange begins after `done` steps; None if none does.

    None begins that would not be applied before the last step, after which all fragments have an
    outer step.
    """
    d = cfg.diloco
    if d is None or not d.overlap or done + d.overlap >= cfg.train.num_steps:
        return None
    turn, since = divmod(done, spacing(cfg))
    return turn % d.fragments if turn > 0 and not since else None


def under_way(done: int, cfg: Config) -> int | None:
    """Return the fragment whose outer gradient the step after `done` steps exchanges a part of."""
    steps = overlap_of(cfg)
    since = done % spacing(cfg) if steps else 0
    return begun(done - since, cfg) if since < steps else None


def applied(done: int, cfg: Config) -> int | None:
    """Return the fragment whose exchanged gradient is applied after `done` steps; None if none."""
    steps = overlap_of(cfg)
    return begun(done - steps, cfg) if steps else None


def overlap_of(cfg: Config) -> int:
    """Return the inner steps during which a gradient is exchanged; 0 without an overlap."""
    return cfg.diloco.overlap if cfg.diloco else 0


def spacing(cfg: Config) -> int:
    """Return the inner steps between the outer steps of two fragments."""
    d = present(cfg.diloco)
    return d.every // d.fragments
