"""Fragments: which arrays each has, and its layers in stacks of layers.

Fragment i of n has the layers whose index is i modulo n; the first also has embeddings, the last
what comes after the layers.

Source:   Douillard et al. 2025 (2501.18512), section 2.2: strided fragments.
"""

import functools
from typing import Any

import flax.traverse_util
import jax
from jax import lax

from jaxpar.config import Config, present
from jaxpar.model.parameters import specs_of
from jaxpar.sharding.params import flat

#: Arrays outside the layers that belong to the first fragment. All others belong to the last.
FIRST = ("embed", "positions")


class Fragment:
    """Fragment i, on arrays by name."""

    def __init__(self, cfg: Config, i: int):
        self._i, self._n, self._specs = i, present(cfg.diloco).fragments, flat(specs_of(cfg))

    @property
    def names(self) -> list[str]:
        """The arrays of which this fragment has a part or all."""
        other = lambda name: self._i == (0 if name in FIRST else self._n - 1)  # noqa: E731
        return [name for name in self._specs if is_layers(self._specs[name]) or other(name)]

    def part(self, name: str, x: jax.Array) -> jax.Array:
        """Return this fragment's part of an array: its layers [L/n, ...], or all of it."""
        if not is_layers(self._specs[name]):
            return x
        return x.reshape(-1, self._n, *x.shape[1:])[:, self._i]

    def put(self, name: str, x: jax.Array, part: jax.Array) -> jax.Array:
        """Return the array with another part."""
        if not is_layers(self._specs[name]):
            return part
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=self._i, axis=1)
        return put(x.reshape(-1, self._n, *x.shape[1:]), part[:, None]).reshape(x.shape)


def is_layers(spec: Any) -> bool:
    """Whether an array is a stack of layers."""
    return spec.axes[0] == "layer"


def tree(leaves: dict[str, Any]) -> Any:
    """Return arrays by name as a tree."""
    return flax.traverse_util.unflatten_dict(leaves, sep="/")
