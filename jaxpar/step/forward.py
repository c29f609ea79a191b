"""Programs of a forward pass that give something for every token of a batch, without a loss."""

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
from jaxpar.objectives import token_scores
from jaxpar.parallel.collectives import varying
from jaxpar.parallel.pipeline.runner import forward_only
from jaxpar.parallel.staged_model import Sums
from jaxpar.sharding.axes import BATCH_SPEC
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.params import join
from jaxpar.step.layer_order import slots_in_use
from jaxpar.step.links import weights_of_step
from jaxpar.step.state import state_specs
from jaxpar.step.train_step import split_microbatches, staged_model, without_backward

#: (weights outside the layers, residual stream, microbatch) -> arrays [B, T/sequence, ...].
type TokenHead = Callable[[Any, jax.Array, Batch], Any]


def make_score_step(
    cfg: Config, mesh: Mesh, max_segments: int | None = None, ex: Execution | None = None
) -> Callable[[Any, Batch], jax.Array]:
    """Return the jitted program (params, batch) -> log probability of each label.

    Args:     as `make_train_step`.
    Returns:  float32 [B, T] in the batch's order of tokens, 0 at IGNORED labels, on every device.
    """

    def head(top: Any, x: jax.Array, mb: Batch) -> jax.Array:
        return token_scores.log_probs(top, x, mb.labels, cfg)

    scores = _token_step(cfg, mesh, head, max_segments, ex)
    return jax.jit(scores, out_shardings=NamedSharding(mesh, PartitionSpec()))


def make_token_step(
    cfg: Config,
    mesh: Mesh,
    head: TokenHead,
    max_segments: int | None = None,
    ex: Execution | None = None,
) -> Callable[[Any, Batch], Any]:
    """Return the jitted program (params, batch) -> what a head gives for each token, sharded by
    BATCH_SPEC.

    Args:     as `make_train_step`.
    """
    return jax.jit(_token_step(cfg, mesh, head, max_segments, ex))


def _token_step(
    cfg: Config, mesh: Mesh, head: TokenHead, max_segments: int | None, ex: Execution | None
) -> Callable[[Any, Batch], Any]:
    return jax.shard_map(
        functools.partial(_of_batch, ex or execution_of(cfg), max_segments, head),
        mesh=mesh,
        in_specs=(state_specs(cfg).params, BATCH_SPEC),
        out_specs=BATCH_SPEC,
    )


def _of_batch(
    ex: Execution, max_segments: int | None, of_tokens: TokenHead, params: Any, batch: Batch
) -> Any:
    """Compute what a head gives for this device's tokens, microbatch by microbatch."""
    ex = without_backward(ex)
    cfg, b = ex.cfg, batch.labels.shape[0]
    weights = weights_of_step(fused_weights.fuse(varying(params), ex), cfg)
    weights = join(weights, slots_in_use(cfg))
    rows = jnp.arange(b, dtype=jnp.int32)

    def head(top: Any, x: jax.Array, mb: Batch) -> Sums:
        # A schedule adds what heads return: each fills the rows of its microbatch.
        put = lambda a: jnp.zeros((b, *a.shape[1:]), a.dtype).at[mb.rows].set(a)  # noqa: E731
        return jnp.float32(0), jax.tree.map(put, of_tokens(top, x, mb))

    model = dataclasses.replace(staged_model(ex, max_segments), head=head)
    microbatches = split_microbatches(
        dataclasses.replace(batch, rows=rows), cfg.parallel.num_microbatches
    )
    return forward_only(model, weights, microbatches, cfg.parallel.virtual_stages)[1]
