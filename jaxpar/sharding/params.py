"""Declarations of parameters: a tree of `ParamSpec`, from which everything else is derived.

Initial values, abstract arrays, shardings, counts and the decay mask are all derived from the tree
that `model/transformer.py` builds. Trees are nested dicts of arrays.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import flax.traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.sharding.axes import COUNTS, partition_spec


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter: its global shape, logical axes and initialization."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """Logical axis of each dimension, a name from `axes.RULES`."""
    init: Literal["normal", "ones", "zeros", "decay_rate", "time_step"] = "normal"
    """decay_rate: the logarithm of a number between 1 and 16. time_step: the number whose softplus
    is between 0.001 and 0.1, evenly by its logarithm."""
    std: float = 0.02
    decay: bool = True
    """Whether weight decay applies: to matrices, not to norms and biases."""
    columns: int = 0
    """Number of last dims that are the columns of a matrix y = x W, its outputs. The dims before
    them are its rows, except those of `axes.COUNTS`. 0: no matrix, or one that is read by row, as
    embeddings are."""
    trainable: bool = True
    """Whether training updates it. A frozen parameter has no gradient and no moments."""
    widths: tuple[float, float] = (1.0, 1.0)
    """In µP, rows and columns of a matrix relative to those of the base model."""
    gradient: float = 1.0
    """In µP, size of the gradients relative to those of the base model."""
    readout: bool = False
    """In µP: whether it maps the residual stream to a number of outputs that does not grow."""
    dtype: str = "float32"
    """Of what a feature keeps; parameters are float32."""

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")

    @property
    def partition_spec(self) -> PartitionSpec:
        return partition_spec(self.axes)

    @property
    def lead(self) -> int:
        """Number of first dims that count layers and experts."""
        return next((i for i, axis in enumerate(self.axes) if axis not in COUNTS), len(self.axes))

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of each matrix, if `columns` is not 0."""
        cut = len(self.shape) - self.columns
        return math.prod(self.shape[self.lead : cut]), math.prod(self.shape[cut:])


def is_spec(node: Any) -> bool:
    """Return whether a tree node is a ParamSpec."""
    return isinstance(node, ParamSpec)


def map_specs(fn: Callable[..., Any], specs: Any, *trees: Any) -> Any:
    """Apply `jax.tree.map` with ParamSpecs as leaves."""
    return jax.tree.map(fn, specs, *trees, is_leaf=is_spec)


def partition_specs(specs: Any) -> Any:
    """Return the tree of PartitionSpecs."""
    return map_specs(lambda spec: spec.partition_spec, specs)


def decay_mask(specs: Any) -> Any:
    """Return the tree of booleans that says where weight decay applies."""
    return map_specs(lambda spec: spec.decay, specs)


def abstract(specs: Any) -> Any:
    """Return the tree of ShapeDtypeStructs with global shapes."""
    return map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)), specs)


def count(specs: Any) -> int:
    """Return the number of parameters."""
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=is_spec))


def flat(tree: Any) -> dict[str, Any]:
    """Return the leaves by name: {"layers/wq": ...}."""
    return flax.traverse_util.flatten_dict(tree, sep="/")


def on_every_stage(specs: Any) -> Any:
    """Return the specs of stacked layers that every stage of a pipeline has."""
    return map_specs(lambda s: dataclasses.replace(s, axes=("depth", *s.axes[1:])), specs)


def with_prefix(prefix: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a tree under flat names, "prefix.name"."""
    return {f"{prefix}.{name}": a for name, a in tree.items()}


def of_prefix(prefix: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `with_prefix`: return the entries with this prefix, by their names."""
    start = prefix + "."
    return {n.removeprefix(start): a for n, a in tree.items() if n.startswith(start)}


def split(tree: Any, specs: Any) -> tuple[Any, Any]:
    """Partition a tree into its trainable and its frozen leaves.

    Args:     tree: has the structure of `specs`, or is `specs`.
    Returns:  (trainable, frozen), for `join`. If all leaves are trainable, the tree itself and {}.
    """
    leaves, is_trainable = flat(tree), {name: spec.trainable for name, spec in flat(specs).items()}
    if all(is_trainable.values()):
        return tree, {}
    parts = [{n: leaves[n] for n in leaves if is_trainable[n] is which} for which in (True, False)]
    trainable, frozen = (flax.traverse_util.unflatten_dict(part, sep="/") for part in parts)
    return trainable, frozen


def join(a: Any, b: Any) -> Any:
    """Merge two trees of dicts, tuples and lists into one with the names of both."""
    if isinstance(a, (tuple, list)):
        return type(a)(map(join, a, b)) if b else a
    return a | b | {name: join(a[name], b[name]) for name in a if name in b}
