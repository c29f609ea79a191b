"""An array that comes with its largest magnitude."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Measured:
    """An array, and its largest magnitude as found by the pass that wrote it, for a reader that
    rounds it to 8 bits: to look for it takes a pass of its own.

    The gradient of one is one too: the array's gradient, and the largest magnitude of that. So
    what makes an array whose gradient will be rounded, and has no use for its largest, gives
    `unmeasured`.
    """

    values: Any
    """Of any shape."""
    largest: Any
    """float32 scalar. NaN where the array has one; XLA's own maximum, on CPUs, may skip it."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def reshape(self, *shape: int) -> "Measured":
        """The same numbers in another shape."""
        return Measured(self.values.reshape(*shape), self.largest)


def unmeasured(values: jax.Array) -> Measured:
    """An array whose largest magnitude nobody will read: 0 stands in its place."""
    return Measured(values, jnp.zeros_like(values, jnp.float32, shape=()))
