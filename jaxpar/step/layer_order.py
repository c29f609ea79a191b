"""The order in which a mesh keeps the model's layers."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.config import Config
from jaxpar.sharding.axes import PIPELINE


def layer_order(cfg: Config) -> np.ndarray | None:
    """Which logical layer each place of the running state holds; None for the logical order."""
    P, v = cfg.parallel.pipeline, cfg.parallel.virtual_stages
    if v == 1:
        return None
    chunks = np.arange(cfg.model.num_layers).reshape(v, P, -1)
    return chunks.transpose(1, 0, 2).ravel()


def layers_here(cfg: Config) -> jax.Array:
    """Inside the step: the model's numbers of the layers that this device holds, int32."""
    per_stage, order = cfg.model.num_layers // cfg.parallel.pipeline, layer_order(cfg)
    places = jnp.arange(per_stage, dtype=jnp.int32) + lax.axis_index(PIPELINE) * per_stage
    return places if order is None else jnp.asarray(order, jnp.int32)[places]
