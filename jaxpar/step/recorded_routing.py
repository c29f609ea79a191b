"""Recorded routing of a step, between its form in a batch or a file and the layers of this device.

whole   unsigned [b, T, layers with experts, k], layers in the model's order
here    float32 [b, T, k] for each layer of this stage (`model/moe/recorded.py`)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.config.layout.layer_kinds import kinds_with_experts
from jaxpar.config.lists.recorded_steps import id_bits
from jaxpar.model.fused_weights import map_layers
from jaxpar.model.moe.recorded import RECORD, REPEAT
from jaxpar.parallel.collectives import psum, varying
from jaxpar.sharding.axes import PIPELINE, TENSOR
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.params import join
from jaxpar.step.expert_loads import ExpertLoads
from jaxpar.step.layer_order import EMPTY, expert_layers_here


def attach(
    weights: Any, frozen: Any, batch: Batch, record: bool, cfg: Config
) -> tuple[Any, Any, Batch]:
    """Give each layer with experts what it needs to record or to repeat a routing.

    Args:     weights: fused. frozen: those without gradients, or {}. batch: of this device; with
              `Batch.experts`, these are repeated.
    Returns:  (weights, with `recorded.RECORD` if `record`; frozen weights, with `recorded.REPEAT`
              if the batch has experts; the batch with `Batch.rows`, without experts).
    """
    rows = varying(jnp.arange(len(batch.tokens), dtype=jnp.int32))
    if record:
        shape = (*batch.tokens.shape, cfg.model.experts_per_token)
        weights = weights | {
            "layers": map_layers(lambda w: _with_record(w, shape), weights["layers"])
        }
    if batch.experts is not None:
        frozen = join(frozen, _to_repeat(batch.experts, cfg))
    return weights, frozen, dataclasses.replace(batch, experts=None, rows=rows)


def _with_record(w: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    if "router" not in w:
        return w
    lead = w["router"].shape[:-2]
    return w | {RECORD: varying(jnp.zeros((*lead, *shape), jnp.float32))}


def _to_repeat(experts: jax.Array, cfg: Config) -> Any:
    """Return `recorded.REPEAT` of each layer here, as a tree like that of `fused_weights.fuse`."""
    m, p = cfg.model, cfg.parallel
    layers = jnp.maximum(expert_layers_here(cfg), 0)
    here = varying(jnp.moveaxis(experts, 2, 0)[layers].astype(jnp.float32))
    chunks: list[Any] = []
    for of_chunk in jnp.split(here, p.virtual_stages):
        if p.layer_loop == "scan":
            chunks.append({REPEAT: of_chunk})
        else:
            dense: tuple[dict, ...] = ({},) * (m.dense_layers if p.pipeline == 1 else 0)
            chunks.append((*dense, *({REPEAT: a} for a in of_chunk)))
    return {"top": {}, "layers": tuple(chunks)}


def detach(grads: Any) -> tuple[Any, jax.Array | None]:
    """Separate gradients into those of parameters and the recorded experts.

    Returns:  (gradients, float32 [layers here, b, T, k] or None).
    """
    layers = jax.tree.leaves(grads["layers"], is_leaf=lambda tree: isinstance(tree, dict))
    found = [w[RECORD] for w in layers if RECORD in w]
    if not found:
        return grads, None
    drop = lambda w: {n: g for n, g in w.items() if n != RECORD}  # noqa: E731
    here = jnp.concatenate([a.reshape(-1, *a.shape[-3:]) for a in found])
    return grads | {"layers": map_layers(drop, grads["layers"])}, here


@jax.named_scope("expert_loads")
def of_all_layers(loads: ExpertLoads, cfg: Config) -> jax.Array:
    """Return the recorded experts of all layers, of this device's tokens, as `Batch.experts`.

    Communication: an all-reduce over PIPELINE and TENSOR.
    """
    m, here = cfg.model, loads.experts
    assert here is not None
    layers, count = expert_layers_here(cfg), len(kinds_with_experts(m))
    at = jnp.where(layers == EMPTY, count, layers)
    every = jnp.zeros((count, *here.shape[1:]), jnp.float32).at[at].set(here, mode="drop")
    whole = jnp.moveaxis(psum(every, (PIPELINE, TENSOR)), 0, 2)
    return whole.astype(f"uint{id_bits(m.num_experts)}")
