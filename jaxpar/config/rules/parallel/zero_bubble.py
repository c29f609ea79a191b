"""Rules about zero-bubble pipelines (`parallel.schedule`)."""

from jaxpar.config import Config, flag, require, value_of


def zero_bubble(cfg: Config) -> None:
    """Check that a zero-bubble schedule has weight gradients to postpone, and idle slots."""
    p, path = cfg.parallel, "parallel.schedule"
    if p.schedule != "zero_bubble" or p.pipeline == 1:
        return
    other = flag(path, "1f1b")
    for name, value in {"zero": 1, "layer_loop": "unroll", "sequence": 1}.items():
        field = f"parallel.{name}"
        rule = f"must be {value} with {path} zero_bubble"
        require(value_of(cfg, field) == value, cfg, field, rule, flag(field, value), other)
    matmuls, field = cfg.compute.matmul_dtype, "compute.matmul_dtype"
    rule = f"must be compute with {path} zero_bubble"
    require(matmuls == "compute", cfg, field, rule, flag(field, "compute"), other)
    rule = f"must be 0 with {path} zero_bubble"
    require(not cfg.lora.rank, cfg, "lora.rank", rule, flag("lora.rank", 0), other)


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
