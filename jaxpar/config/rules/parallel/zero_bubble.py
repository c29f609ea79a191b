"""Rules about zero-bubble pipelines (`parallel.schedule`)."""

from jaxpar.config import Config, flag, require


def enough_microbatches(cfg: Config) -> None:
    """Check that a zero-bubble schedule has the microbatches that it needs."""
    p, path = cfg.parallel, "parallel.num_microbatches"
    least = 2 * p.pipeline - 1
    if p.schedule != "zero_bubble" or p.pipeline == 1 or p.num_microbatches >= least:
        return
    rule = f"must be at least {least}, 2 * parallel.pipeline - 1, with parallel.schedule "
    rows = cfg.train.global_batch_size // (p.replica * max(p.data, 1) * p.expert)
    round_ = p.pipeline if p.virtual_stages > 1 else 1
    divisors = [n for n in range(least, rows + 1) if rows % n == 0 and n % round_ == 0]
    ways = [] if cfg.train.micro_batch_size else [flag(path, n) for n in divisors[:1]]
    require(False, cfg, path, rule + p.schedule, *ways, flag("parallel.schedule", "1f1b"))
