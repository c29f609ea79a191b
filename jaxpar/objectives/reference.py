"""The preference loss in plain jax.numpy, pair by pair, to compare with. One device, no kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.model import reference
from jaxpar.model.moe.reference import router_loss
from jaxpar.sharding.batch import IGNORED, Batch


def preference_loss(params: Any, batch: Batch, cfg: Config) -> jax.Array:
    """Compute the mean loss over the pairs of a batch, with the losses of routers.

    Args:     params: the logical parameters. batch: [B, T] in text order; document 2k + 1 of a row
              is the chosen response of its pair k, document 2k + 2 the rejected one.
    """
    params = reference.scale_adapters(params, cfg)
    x, routers = reference.hidden_and_routers(params, batch, cfg)
    scores = jax.nn.log_softmax(reference.output(x, params, cfg.model))
    of_label = jnp.take_along_axis(scores, jnp.maximum(batch.labels, 0)[..., None], -1)[..., 0]
    ratios = jnp.where(batch.labels == IGNORED, 0.0, of_label - batch.reference)
    total, count = jnp.float32(0), jnp.float32(0)
    for k in range(batch.labels.shape[1] // 2):
        chosen, rejected = (
            jnp.sum(jnp.where(batch.segment_ids == document, ratios, 0.0), axis=1)
            for document in (2 * k + 1, 2 * k + 2)
        )
        there = jnp.any(batch.segment_ids == 2 * k + 1, axis=1)
        total += jnp.sum(jnp.where(there, _loss(cfg.dpo.beta * (chosen - rejected), cfg), 0.0))
        count += jnp.sum(there)
    return total / count + sum(router_loss(one, cfg) for one in routers)


def _loss(margin: jax.Array, cfg: Config) -> jax.Array:
    e = cfg.dpo.label_smoothing
    return (1 - e) * jnp.log1p(jnp.exp(-margin)) + e * jnp.log1p(jnp.exp(margin))
