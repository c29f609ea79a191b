"""The blocks of moments in 8 bits: neighboring elements that share a scale."""

from collections.abc import Iterator

from jaxpar.config.layout.expert_placement import spreads_experts
from jaxpar.config.schema import OptimizerConfig, ParallelConfig
from jaxpar.config.schema.model import ModelConfig

#: The storage of a moment as 8-bit codes with one float32 scale a block.
EIGHT_BITS = "8bit"

#: Dims that have no divisor between this and `optimizer.moment_block` are not divided into blocks.
SMALLEST = 16


def block_of(size: int, most: int) -> int:
    """Return the largest divisor of a dim's size that is at most `most`; 0 if it is too small."""
    found = max(n for n in range(1, min(size, most) + 1) if size % n == 0)
    return found if found >= SMALLEST else 0


def uses_blocks(o: OptimizerConfig) -> bool:
    """Return whether a moment is stored in 8 bits."""
    return EIGHT_BITS in (o.first_moment_dtype, o.second_moment_dtype)


def split_sizes(m: ModelConfig, p: ParallelConfig) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Return the dims with blocks that a mesh may split: name, size and the fields of its axes."""
    yield "model.d_model", m.d_model, ("parallel.data", "parallel.expert", "parallel.sequence")
    tensor = ("parallel.tensor",)
    if not (m.num_experts and spreads_experts(p)):
        yield "model.d_ff", m.d_ff, tensor
    if m.num_shared_experts:
        yield "num_shared_experts * d_ff", m.num_shared_experts * m.d_ff, tensor
    if m.dense_d_ff:
        yield "model.dense_d_ff", m.dense_d_ff, tensor
