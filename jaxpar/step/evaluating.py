"""Sums the results of evaluation steps over batches."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxpar.sharding.batch import Batch

#: Batches that are dispatched before the host waits for the first of them.
AHEAD = 2


def mean_loss(
    step: Callable[[Any, Batch], tuple[jax.Array, jax.Array]], params: Any, batches: Iterable[Batch]
) -> float | None:
    """Return the mean cross entropy over the labels of some batches, in nats; None without labels.

    Args:     step: (params, batch) -> (summed loss, labeled tokens), as `make_eval_step` makes it.
    """
    sums: list[tuple[jax.Array, jax.Array]] = []
    for batch in batches:
        sums.append(step(params, batch))  # the devices do not wait for the host
        if len(sums) > AHEAD:
            jax.block_until_ready(sums[-1 - AHEAD])
    fetched = jax.device_get(sums)
    labels = sum(float(count) for _, count in fetched)
    return sum(float(loss) for loss, _ in fetched) / labels if labels else None
