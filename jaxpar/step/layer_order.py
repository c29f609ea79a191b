"""The order in which a mesh stores the model's layers."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.config import Config
from jaxpar.sharding.axes import PIPELINE


def layer_order(cfg: Config) -> np.ndarray | None:
    """Return the logical layer stored at each index of the running state; None if unchanged."""
    P, v = cfg.parallel.pipeline, cfg.parallel.virtual_stages
    if v == 1:
        return None
    chunks = np.arange(cfg.model.num_layers).reshape(v, P, -1)
    return chunks.transpose(1, 0, 2).ravel()


def layers_here(cfg: Config) -> jax.Array:
    """Return the logical indices of this device's layers, int32. Called inside the step."""
    per_stage, order = cfg.model.num_layers // cfg.parallel.pipeline, layer_order(cfg)
    places = jnp.arange(per_stage, dtype=jnp.int32) + lax.axis_index(PIPELINE) * per_stage
    return places if order is None else jnp.asarray(order, jnp.int32)[places]
