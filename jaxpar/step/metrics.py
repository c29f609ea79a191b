"""The metrics that a step returns: arrays by name, in the order of METRICS."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxpar.config.metrics import METRICS


@jax.tree_util.register_pytree_with_keys_class
class Metrics(dict):
    """A step's metrics by name, in the order of METRICS."""

    def tree_flatten_with_keys(self) -> tuple[Iterable[tuple[Any, Any]], Any]:
        names = tuple(sorted(self, key=_place))
        return [(jax.tree_util.DictKey(n), self[n]) for n in names], names

    @classmethod
    def tree_unflatten(cls, names: Any, values: Any) -> "Metrics":
        return cls(zip(names, values, strict=True))


#: A train step inside the `shard_map`: (TrainState, batch, ...) -> (TrainState, metrics, records).
#: Metrics are the same on every device; records are arrays [B, T, ...] of its tokens, and gradients
#: if they are requested.
type Step = Callable[..., tuple[Any, Metrics, dict[str, Any]]]


def _place(name: str) -> tuple[int, str]:
    known = list(METRICS)
    return (known.index(name), "") if name in METRICS else (len(known), name)
