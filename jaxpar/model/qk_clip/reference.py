"""The largest logit of each head in plain jax.numpy, to compare with."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.model import reference
from jaxpar.model.qk_clip.rescale import factors, rescaled
from jaxpar.sharding.batch import Batch


def largest_logits(params: Any, batch: Batch, cfg: Config) -> jax.Array:
    """Compute the largest attention logit of each layer and head of a batch: float32 [L, H]."""
    found: list[jax.Array] = []

    def watch(point: str, value: jax.Array) -> None:
        if point == "queries":
            found.append(jnp.max(value, axis=(0, 2, 3)))

    reference.hidden_and_routers(params, batch, cfg, watch)
    return jnp.stack(found)


def clipped(params: Any, largest: jax.Array, cfg: Config) -> Any:
    """Return parameters after QK-clip, given the largest logits of the step."""
    eta, dense = factors(largest, cfg.optimizer.qk_clip), cfg.model.dense_layers
    found = params | {"layers": rescaled(params["layers"], eta[dense:], cfg.model)}
    if dense:
        found["dense_layers"] = rescaled(params["dense_layers"], eta[:dense], cfg.model)
    return found
