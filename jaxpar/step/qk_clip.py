"""QK-clip in a step: records the largest logits, and rescales weights after the update."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config
from jaxpar.model.fused_weights import map_layers
from jaxpar.model.qk_clip.logits import MAXIMUM
from jaxpar.model.qk_clip.rescale import factors, rescaled
from jaxpar.parallel.collectives import psum, varying
from jaxpar.sharding.axes import PIPELINE, TENSOR, TOKEN_AXES
from jaxpar.sharding.batch import Batch
from jaxpar.step.layer_order import EMPTY, layers_here

type Tree = dict[str, Any]

#: Weights of which one says that a layer has attention.
OF_ATTENTION = ("wqkv", "wkv_a")


def attach(weights: Tree, batch: Batch, cfg: Config) -> tuple[Tree, Batch]:
    """Add `MAXIMUM` to each layer with attention, and `Batch.rows` to the batch.

    Args:     weights: fused. batch: of this device.
    """
    rows = varying(jnp.arange(len(batch.tokens), dtype=jnp.int32))
    shape = len(batch.tokens), cfg.model.num_heads // lax.axis_size(TENSOR)

    def add(w: Tree) -> Tree:
        (name,) = (name for name in OF_ATTENTION if name in w)
        zeros = jnp.zeros((*w[name].shape[:-2], *shape), jnp.float32)
        return w | {MAXIMUM: varying(zeros)}

    layers = map_layers(add, weights["layers"])
    return weights | {"layers": layers}, dataclasses.replace(batch, rows=rows)


def detach(grads: Tree, cfg: Config) -> tuple[Tree, jax.Array | None]:
    """Separate gradients into those of parameters and the largest logits of all tokens.

    Returns:  (gradients, float32 [layers here, H/tensor]: -inf in an empty slot; None without
              `optimizer.qk_clip`).
    Communication: a maximum over TOKEN_AXES.
    """
    if not cfg.optimizer.qk_clip:
        return grads, None
    layers = jax.tree.leaves(grads["layers"], is_leaf=lambda tree: isinstance(tree, dict))
    found = [w[MAXIMUM] for w in layers]
    own = jnp.concatenate([jnp.max(a, axis=-2).reshape(-1, a.shape[-1]) for a in found])
    drop = lambda w: {n: g for n, g in w.items() if n != MAXIMUM}  # noqa: E731
    rest = grads | {"layers": map_layers(drop, grads["layers"])}
    largest = lax.pmax(own, TOKEN_AXES)
    return rest, jnp.where((layers_here(cfg) == EMPTY)[:, None], -jnp.inf, largest)


@jax.named_scope("qk_clip")
def clip(params: Tree, largest: jax.Array, ok: jax.Array, cfg: Config) -> Tree:
    """Rescale the weights of heads whose largest logit is above the threshold, if `ok`.

    Args:     params: this device's shards. largest: of its layers and heads, from `detach`.
    """
    dense = cfg.model.dense_layers
    eta = jnp.where(ok, factors(largest, cfg.optimizer.qk_clip), 1.0)
    found = params | {"layers": rescaled(params["layers"], eta[dense:], cfg.model)}
    if dense:  # which every stage holds: one stage alone, so this changes the type and no value
        of_dense = lax.pmin(eta[:dense], PIPELINE)
        found["dense_layers"] = rescaled(params["dense_layers"], of_dense, cfg.model)
    return found


def metrics(largest: jax.Array | None, cfg: Config) -> dict[str, jax.Array]:
    """Return the fields of `StepMetrics`; none without `optimizer.qk_clip`.

    Communication: a maximum and a sum over PIPELINE and TENSOR.
    """
    if largest is None:
        return {}
    axes = (PIPELINE, TENSOR)
    above = jnp.sum(largest > cfg.optimizer.qk_clip, dtype=jnp.float32)
    return {
        "max_attention_logit": lax.pmax(jnp.max(largest), axes),
        "clipped_heads": psum(above, axes),
        "attention_logits": largest,
    }
