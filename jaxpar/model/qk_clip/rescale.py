"""The rescaling of the matrices of queries and keys, head by head.

    eta = min(1, threshold / largest logit of the head)

A head's logits are products of its query and its key, so scaling both by sqrt(eta) brings its
largest logit to the threshold.

    grouped queries     A key head has several query heads. It is scaled by the square root of the
                        largest of their etas, and each query head by what is left of its own eta.
                        A head that need not be clipped then keeps its logits.
    latent attention    The parts without position are scaled by sqrt(eta). The rotary key is shared
                        by all heads, so the rotary part of the query alone is scaled, by eta.

Source:   Kimi Team 2025 (2507.20534), section 2.1 and algorithm 1.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import ModelConfig

type Tree = dict[str, Any]


def factors(largest: jax.Array, threshold: float) -> jax.Array:
    """Return eta of each head, from its largest logit: float32, at most 1."""
    return jnp.where(largest > threshold, threshold / jnp.maximum(largest, threshold), 1.0)


def rescaled(w: Tree, eta: jax.Array, m: ModelConfig) -> Tree:
    """Return the weights of attention of stacked layers, rescaled.

    Args:     w: of stacked layers, as named in `model/parameters.py`; a device's shards or whole.
              eta: float32 [L, H], of the same layers and heads.
    """
    if m.kv_lora_rank:
        return w | _latent(w, eta, m)
    L, H = eta.shape
    G = w["wk"].shape[2]
    of_group = jnp.max(eta.reshape(L, G, H // G), axis=2)
    of_key = jnp.sqrt(of_group)
    of_query = (eta.reshape(L, G, H // G) / of_key[:, :, None]).reshape(L, H)
    by_head = {"wq": of_query, "bq": of_query, "wk": of_key, "bk": of_key}
    return w | {name: _times(w[name], factor) for name, factor in by_head.items() if name in w}


def _latent(w: Tree, eta: jax.Array, m: ModelConfig) -> Tree:
    half, nope = jnp.sqrt(eta)[..., None], m.qk_nope_head_dim
    query = "wq_b" if m.q_lora_rank else "wq"
    of_query = jnp.concatenate(
        [
            jnp.broadcast_to(half, (*eta.shape, nope)),
            jnp.broadcast_to(eta[..., None], (*eta.shape, m.qk_rope_head_dim)),
        ],
        axis=-1,
    )
    ones = jnp.ones((*eta.shape, m.v_head_dim), eta.dtype)
    of_key = jnp.concatenate([jnp.broadcast_to(half, (*eta.shape, nope)), ones], axis=-1)
    by_dim = {query: of_query, "wkv_b": of_key}
    return {name: w[name] * factor[:, None] for name, factor in by_dim.items()}


def _times(a: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiply [L, ..., heads, K] by a factor [L, heads]."""
    between = (1,) * (a.ndim - 3)
    return a * factor.reshape(factor.shape[0], *between, factor.shape[1], 1)
