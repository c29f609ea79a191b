"""Sums the results of evaluation steps over batches."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxpar.sharding.batch import Batch

#: Batches that are dispatched before the host waits for the first of them.
AHEAD = 2


def mean_loss(
    step: Callable[[Any, Batch], tuple[jax.Array, jax.Array]], params: Any, batches: Iterable[Batch]
) -> float | None:
    """Return the mean cross entropy over the labels of some batches, in nats; None without labels.

    Args:     step: (params, batch) -> (summed loss, labeled tokens), as `make_eval_step` makes it.
    """
    found = means(step, params, batches)
    return None if found is None else float(found)


def means(
    step: Callable[[Any, Batch], tuple[jax.Array, jax.Array]], params: Any, batches: Iterable[Batch]
) -> np.ndarray | None:
    """Return the quotient of what an evaluation step sums over some batches, float64; None if the
    divisor is 0.

    Args:     step: (params, batch) -> (sums, divisor), as `make_eval_step` makes it.
    """
    sums: list[tuple[jax.Array, jax.Array]] = []
    for batch in batches:
        sums.append(step(params, batch))  # the devices do not wait for the host
        if len(sums) > AHEAD:
            jax.block_until_ready(sums[-1 - AHEAD])
    fetched = jax.device_get(sums)
    total = np.sum([np.asarray(part, np.float64) for part, _ in fetched], axis=0)
    divisor = sum(float(count) for _, count in fetched)
    return total / divisor if divisor else None
