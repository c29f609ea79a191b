"""The largest logit of each head in plain jax.numpy, to compare with."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.config.layout.composition import model_of
from jaxpar.model.plain import decoder
from jaxpar.model.qk_clip.rescale import factors, rescaled
from jaxpar.sharding.batch import Batch


def largest_logits(params: Any, batch: Batch, cfg: Config) -> jax.Array:
    """Compute the largest attention logit of each layer and head of a batch: float32 [L, H]."""
    found: list[jax.Array] = []

    def watch(point: str, value: jax.Array) -> None:
        if point == "queries":
            found.append(jnp.max(value, axis=(0, 2, 3)))

    decoder.hidden_and_routings(params, batch, cfg, watch)
    return jnp.stack(found)


def clipped(params: Any, largest: jax.Array, cfg: Config) -> Any:
    """Return parameters after QK-clip, given the largest logits of the step."""
    eta, places = factors(largest, cfg.optimizer.qk_clip), model_of(cfg.model).places
    found = dict(params)
    for stack in dict.fromkeys(name for name, _ in places):
        rows = jnp.array([i for i, (name, _) in enumerate(places) if name == stack])
        found[stack] = rescaled(params[stack], eta[rows], cfg.model)
    return found
