"""The log probability of every label of a batch, as one program: a forward pass without a loss."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.config import Config
from jaxpar.execution.decisions import Execution, execution_of
from jaxpar.model import fused_weights
from jaxpar.objectives import label_scores
from jaxpar.parallel.collectives import varying
from jaxpar.parallel.pipeline.runner import forward_only
from jaxpar.parallel.staged_model import Sums
from jaxpar.sharding.axes import BATCH_SPEC
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.params import join
from jaxpar.step.layer_order import slots_in_use
from jaxpar.step.state import state_specs
from jaxpar.step.step_weights import weights_of_step
from jaxpar.step.train_step import (
    split_microbatches,
    staged_model,
    without_backward,
)


def make_score_step(
    cfg: Config, mesh: Mesh, max_segments: int | None = None, ex: Execution | None = None
) -> Callable[[Any, Batch], jax.Array]:
    """Return the jitted program (params, batch) -> log probability of each label.

    Args:     as `make_train_step`.
    Returns:  float32 [B, T] in the batch's order of tokens, 0 at IGNORED labels, on every device.
    """
    scores = jax.shard_map(
        functools.partial(score_step, ex or execution_of(cfg), max_segments),
        mesh=mesh,
        in_specs=(state_specs(cfg).params, BATCH_SPEC),
        out_specs=BATCH_SPEC,
    )
    return jax.jit(scores, out_shardings=NamedSharding(mesh, PartitionSpec()))


def score_step(ex: Execution, max_segments: int | None, params: Any, batch: Batch) -> jax.Array:
    """Compute the log probabilities of this device's labels, microbatch by microbatch."""
    ex = without_backward(ex)
    cfg, b = ex.cfg, batch.labels.shape[0]
    weights = weights_of_step(fused_weights.fuse(varying(params), ex), cfg)
    weights = join(weights, slots_in_use(cfg))
    rows = jnp.arange(b, dtype=jnp.int32)

    def head(top: Any, x: jax.Array, mb: Batch) -> Sums:
        # A schedule adds what heads return: each fills the rows of its microbatch.
        found = label_scores.of_stream(top, x, mb.labels, cfg)
        return jnp.sum(found), jnp.zeros((b, found.shape[1]), found.dtype).at[mb.rows].set(found)

    model = dataclasses.replace(staged_model(ex, max_segments), head=head)
    microbatches = split_microbatches(
        dataclasses.replace(batch, rows=rows), cfg.parallel.num_microbatches
    )
    return forward_only(model, weights, microbatches, cfg.parallel.virtual_stages)[1]
