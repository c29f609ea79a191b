"""How a model's layers are split into the chunks of a pipeline's stages."""

from jaxpar.components.model import Model
from jaxpar.config.schema import Config, ParallelConfig

#: The field of the schema.
FIELD = "parallel.layers_per_stage"


def layers_before_stages(m: Model, p: ParallelConfig) -> int:
    """Return the number of layers before the first stage: those before the layers that repeat, such
    as the dense layers of DeepSeek-V3, in a pipeline.

    They run with the embedding (`model/transformer.embed_and_first_layers`), since all stages
    execute the same layers. Without a pipeline, they are the first ones of the only chunk.
    """
    if p.pipeline == 1:
        return 0
    return m.repetition.start


def layers_per_chunk(cfg: Config) -> tuple[int, ...]:
    """Return the number of layers of each chunk, in the order of the model.

    Chunk c of stage s is the (c * P + s)-th. Layers before the stages (`layers_before_stages`) are
    in no chunk. The numbers are those of `parallel.layers_per_stage`, or `even_split`.

    Args:     cfg: satisfies the rule `rules.layout.layers`.
    """
    return cfg.parallel.layers_per_stage or even_split(cfg.model, cfg.parallel)


def even_split(m: Model, p: ParallelConfig) -> tuple[int, ...]:
    """Return numbers of layers that differ by at most one; the first chunks have more.

    Each stage has the same part of the embedding and of the head (the vocabulary is split over the
    pipeline), so layers are all that differs in cost. Where layers differ, whole periods
    (`Model.repetition`) are split, and the last chunk may end with part of one. Layers before the
    stages are work of the first, whose chunk has as many layers less, but at least one.
    """
    period, chunks = m.repetition.period, p.pipeline * p.virtual_stages
    before = layers_before_stages(m, p)
    staged, periods = m.num_layers - before, -(-(m.num_layers - before) // period)
    if before:
        equal = _evenly(-(-m.num_layers // period), chunks)[0]
        first = max(equal - -(-before // period), 1)
        parts = [first, *_evenly(periods - first, chunks - 1)]
    else:
        parts = _evenly(periods, chunks)
    sizes = [period * n for n in parts]
    sizes[-1] -= sum(sizes) - staged
    return tuple(sizes)


def _evenly(n: int, parts: int) -> list[int]:
    """Split a number into parts that differ by at most one, the larger ones first."""
    each, more = divmod(n, parts)
    return [each + (k < more) for k in range(parts)]


def slots_per_chunk(cfg: Config) -> int:
    """Return the layers of the largest chunk. Every chunk has memory for as many."""
    return max(layers_per_chunk(cfg))


def is_equal(cfg: Config) -> bool:
    """Return whether all chunks have the same number of layers."""
    return len(set(layers_per_chunk(cfg))) == 1
