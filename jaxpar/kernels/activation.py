"""Activations of a feed-forward without a gate: elementwise functions of one array."""

from typing import Literal

import jax
import jax.numpy as jnp

type Activation = Literal["silu", "gelu", "gelu_exact", "relu_squared"]


def activated(x: jax.Array, kind: Activation) -> jax.Array:
    """Apply an activation, by its name in `model.activation`.

    Source:   So et al. 2021 (2109.08668), section 4: the squared ReLU.
    """
    match kind:
        case "silu":
            return jax.nn.silu(x)
        case "relu_squared":
            return jnp.square(jax.nn.relu(x))
        case kind:
            return jax.nn.gelu(x, approximate=kind == "gelu")
