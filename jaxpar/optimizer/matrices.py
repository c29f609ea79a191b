"""The matrices among the parameters, as update rules see them.

Most rules are elementwise: they update the shards of a device without looking at others. A rule
that needs whole matrices gets a `Matrices`.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.traverse_util
import jax

from jaxpar.parallel.matrices import MatrixLayout, layout_of, map_matrices
from jaxpar.sharding.params import ParamSpec, flat, map_specs


def is_matrix(spec: ParamSpec) -> bool:
    """Return whether a parameter has matrices that map activations to activations.

    These are the weights of layers. Embeddings, the head, routers, convolutions, norms and biases
    are not.
    """
    return spec.columns > 0


@dataclass(frozen=True)
class Matrices:
    """The matrices among a tree of parameters.

    specs      of the parameters.
    sharded    whether arrays are a device's shards, inside the step's `shard_map`. If not, they
               are complete.
    """

    specs: Any
    sharded: bool = False

    def mask(self) -> Any:
        """Return the tree of booleans that says which parameters have matrices."""
        return map_specs(is_matrix, self.specs)

    def map(self, fn: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
        """Apply a function to all matrices of a tree like the parameters, each as a whole.

        A matrix is [rows, columns] = [inputs, outputs], for y = x W. Those with more dims are
        reshaped: the projection of queries [D, H, K] is [D, H K]. Every matrix is at one device of
        the mesh while `fn` runs (`parallel/matrices.py`).

        Args:     fn: [n, rows, columns] -> the same shape and dtype. It must not mix matrices, and
                  must return zeros for a matrix of zeros, of which there may be some. tree: arrays
                  of the parameters' shapes. Those without matrices are not read, and may be absent.
        """
        specs, arrays = flat(self.specs), flat(tree)
        groups: dict[MatrixLayout, list[str]] = defaultdict(list)
        for name in filter(lambda name: is_matrix(specs[name]), specs):
            layout = layout_of(specs[name], arrays[name].shape, sharded=self.sharded)
            groups[layout].append(name)
        for layout, names in groups.items():
            found = map_matrices(fn, [arrays[name] for name in names], layout)
            arrays |= dict(zip(names, found, strict=True))
        return flax.traverse_util.unflatten_dict(arrays, sep="/")
