"""Rules about the layout, which the config sets or the planner chooses for the devices.

A layout is the mesh and the fields of `parallel` that depend on it.
"""

from jaxpar.config import Config, flag, require
from jaxpar.config.layout.layer_split import (
    FIELD,
    even_split,
    layers_before_stages,
    layers_per_chunk,
)

#: Bytes of an element that top_k sends, and of its sum in float32: sent twice, by each replica.
VALUE_AND_PLACE, SUMMED = 6, 8


def interleaving(cfg: Config) -> None:
    """Check that virtual stages have a pipeline."""
    p, path = cfg.parallel, "parallel.virtual_stages"
    rule = "needs a pipeline, but parallel.pipeline is 1"
    ways = flag(path, 1), flag("parallel.pipeline", 2)
    require(p.virtual_stages == 1 or p.pipeline > 1, cfg, path, rule, *ways)


def layers(cfg: Config) -> None:
    """Check that every chunk of the pipeline has layers, all chunks together those of the model.

    Where layers differ, chunks begin with a period, so that all have the same pattern.
    """
    m, p, period = cfg.model, cfg.parallel, cfg.model.repetition.period
    chunks, path = p.pipeline * p.virtual_stages, "model.num_layers"
    dense = layers_before_stages(m, p)
    least, one = (chunks - 1) * period + 1 + dense, f"{period} layers" if period > 1 else "1 layer"
    stages = "virtual stages" if p.virtual_stages > 1 else "stages"
    rule = f"must be at least {least}: {one} for each of {chunks} {stages} of the pipeline"
    if period > 1:
        rule += f" except the last, since the layers repeat after {period}"
    if dense:
        rule += f", and the {dense} before those that repeat"
    first, each = m.repetition
    fits = first + -(-(least - first) // each) * each
    require(m.num_layers >= least, cfg, path, rule, flag(path, fits))
    if not p.layers_per_stage:
        return
    sizes, way = layers_per_chunk(cfg), flag(FIELD, even_split(m, p))
    rule = f"must have a number for each of {chunks} {stages}, but has {len(sizes)}"
    require(len(sizes) == chunks, cfg, FIELD, rule, way)
    rule = f"must add up to model.num_layers = {m.num_layers}, not to {sum(sizes)}"
    if dense:
        rule = f"must add up to {m.num_layers - dense}, the layers after the first {dense}, which "
        rule += f"run before the stages, not to {sum(sizes)}"
    require(sum(sizes) == m.num_layers - dense, cfg, FIELD, rule, way)
    rule = f"must be multiples of {period} except the last, so that {stages} begin with the same "
    rule += f"kind of layer: the layers repeat after {period}"
    require(all(size % period == 0 for size in sizes[:-1]), cfg, FIELD, rule, way)


def compressed_sums(cfg: Config) -> None:
    """Check that a compressed sum over replicas has replicas, and sends less than float32."""
    p, path = cfg.parallel, "parallel.replica_reduction"
    if p.replica_reduction == "float32":
        return
    plain = flag(path, "float32")
    rule = f"must be at least 2 with {path} {p.replica_reduction}, which compresses what replicas "
    rule += "send each other"
    require(p.replica > 1, cfg, "parallel.replica", rule, flag("parallel.replica", 2), plain)
    if p.replica_reduction == "top_k":
        most = SUMMED / VALUE_AND_PLACE / p.replica
        rule = f"must be below {most:.3g} with {p.replica} replicas: each sends its values and "
        rule += "their places to all others, which is more than a sum in float32 sends"
        fewer = (flag("parallel.replica_top_k", 0.01),) if most > 0.01 else ()
        require(p.replica_top_k < most, cfg, "parallel.replica_top_k", rule, *fewer, plain)


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
