"""Repeats a recorded routing in every step of a measurement."""

import contextlib
import dataclasses
from collections.abc import Generator

import jax
from jax.sharding import Mesh, NamedSharding

from jaxpar.config import Config
from jaxpar.monitoring.routing import RecordedRouting
from jaxpar.parallel.context import order_of
from jaxpar.sharding.axes import BATCH_SPEC
from jaxpar.sharding.batch import Batch


class RoutingReplay:
    """Adds a recorded routing to batches. It is copied to the devices once."""

    def __init__(self, routing: RecordedRouting, cfg: Config, mesh: Mesh):
        """
        Args:     cfg: resolved for the mesh; the routing fits it.
        """
        order, experts = order_of(cfg), routing.experts
        placed = experts if order is None else experts[:, order]
        sharding = NamedSharding(mesh, BATCH_SPEC)
        self._experts = jax.make_array_from_callback(placed.shape, sharding, placed.__getitem__)

    def of(self, batch: Batch) -> Batch:
        """Return a batch with the routing."""
        return dataclasses.replace(batch, experts=self._experts)

    def of_each(self, batches: Generator[tuple[int, Batch]]) -> Generator[tuple[int, Batch]]:
        """Yield each batch with the routing. Closes `batches` at the end."""
        with contextlib.closing(batches):
            for step, batch in batches:
                yield step, self.of(batch)
