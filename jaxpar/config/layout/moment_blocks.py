"""The blocks of moments in 8 bits: neighboring elements that share a scale."""

from collections.abc import Iterator

from jaxpar.components.dims import dims_of
from jaxpar.components.model import Model
from jaxpar.components.weight import RULES
from jaxpar.config.layout.placement import spreads_experts
from jaxpar.config.schema import OptimizerConfig, ParallelConfig

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


def split_sizes(model: Model, p: ParallelConfig) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Return the dims with blocks that a mesh may split: name, size and the fields of its axes."""
    fields = lambda axis: tuple(f"parallel.{name}" for name in RULES[axis])  # noqa: E731
    yield "model.d_model", model.d_model, fields("embed")
    for layer in dict.fromkeys(model.layers):
        for role, term in (("mixer", layer.mixer), ("feed_forward", layer.feed_forward)):
            dims = dims_of(term, model, is_spread=spreads_experts(p)) if term else ()
            sizes = {dim.size: dim.fields or (dim.weight,) for dim in dims if dim.axis == "mlp"}
            for size, made_by in sizes.items():
                address = f"model.{layer.name}.{role}."
                yield " * ".join(address + field for field in made_by), size, fields("mlp")
