"""The training state and the steps of a config on a mesh."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxpar.config import Config
from jaxpar.config.validate import resolve
from jaxpar.objectives.objective import objective_of
from jaxpar.parallel.context import order_of
from jaxpar.runtime.start import PRECISIONS
from jaxpar.sharding.axes import BATCH_SPEC
from jaxpar.sharding.batch import Batch
from jaxpar.step import state as states
from jaxpar.step import train_step
from jaxpar.step.state import TrainState


def init_state(config: Config, mesh: Mesh) -> TrainState:
    """Return the state before the first step. Each device initializes its own shards.

    Args:     config: its `parallel` section has the sizes of the mesh's axes. mesh: from
              `jaxpar.sharding.mesh.make_mesh`.
    """
    return states.init_state(resolve(config, mesh.size), mesh)


def make_train_step(
    config: Config, mesh: Mesh, max_segments: int | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Return the train step of a config: the program that `python -m jaxpar.train` runs.

    Args:     config, mesh: as for `init_state`. max_segments: the most documents in a sequence,
              which attention kernels of packed documents need.
    Returns:  (state, batch) -> (state, metrics). It takes a `Batch` of arrays in text order, which
              it puts on the mesh, and reuses the memory of the state that it is given. Metrics are
              float32 scalars, the same on every device.
    """
    cfg = resolve(config, mesh.size)
    step = _prepared(train_step.make_train_step(cfg, mesh, max_segments), cfg, mesh)

    def take(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        state, metrics = step(state, batch)
        return state, dict(metrics)

    return take


def make_eval_step(
    config: Config, mesh: Mesh, max_segments: int | None = None
) -> Callable[[Any, Batch], dict[str, jax.Array]]:
    """Return the evaluation step of a config.

    Args:     as for `make_train_step`.
    Returns:  (params, batch) -> metrics: `loss`, its metrics, and `num_tokens`, the number of
              labeled tokens.
    """
    cfg = resolve(config, mesh.size)
    step = _prepared(train_step.make_eval_step(cfg, mesh, max_segments), cfg, mesh)

    def take(params: Any, batch: Batch) -> dict[str, jax.Array]:
        total, count = step(params, batch)
        return objective_of(cfg).report(total / count) | {"num_tokens": (batch.labels >= 0).sum()}

    return take


def shard_batch(batch: Batch, cfg: Config, mesh: Mesh) -> Batch:
    """Put a batch in text order on the mesh, in the order in which its devices take the tokens.

    Args:     cfg: resolved.
    """
    order, to = order_of(cfg), NamedSharding(mesh, BATCH_SPEC)
    put = lambda a: jax.device_put(a if order is None else a[:, order], to)  # noqa: E731
    return jax.tree.map(put, batch)


def _prepared(step: Callable, cfg: Config, mesh: Mesh) -> Callable:
    """Return a step that takes batches in text order, and multiplies as the config says."""
    precision = PRECISIONS[cfg.compute.matmul_precision]

    def prepared(first: Any, batch: Batch) -> Any:
        chosen = jax.default_matmul_precision(precision) if precision else contextlib.nullcontext()
        with chosen:
            return step(first, shard_batch(batch, cfg, mesh))

    return prepared
