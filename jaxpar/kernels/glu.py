"""Gated linear units: hidden values of a gate and an up projection, and their gradients.

Each is a value with the same two methods. They are elementwise, so that they run in float32 on
arrays of any shape, and on tiles within kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

type Gradients = tuple[tuple[Any, Any, Any], tuple[Any, Any]]


class GluKernel(Protocol):
    """A gated linear unit: hidden = act(gate) * value(up)."""

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Compute the hidden values. All arrays have one shape."""

    def gradients(self, gate: Any, up: Any, d_hidden: Any, scale: Any) -> Gradients:
        """Compute hidden * scale and its gradients, in float32.

        Args:     d_hidden: gradient of hidden * scale. scale: broadcasts to the other arrays.
        Returns:  ((hidden * scale, gradient of gate, gradient of up), (act, value)). The gradient
                  of scale is the sum of act * value * d_hidden over the elements that it scales.
        """


@dataclass(frozen=True)
class SwiGLU:
    """silu(gate) * up.

    Source:   Shazeer 2020 (2002.05202), equation 5.
    """

    sigmoid: Callable[[Any], Any] = jax.nn.sigmoid
    """In kernels, one that their compiler supports. Only `gradients` reads it."""

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """`GluKernel.hidden`."""
        return jax.nn.silu(gate) * up

    def gradients(self, gate: Any, up: Any, d_hidden: Any, scale: Any) -> Gradients:
        """`GluKernel.gradients`."""
        sigmoid = self.sigmoid(gate)
        act = gate * sigmoid
        d_gate = d_hidden * scale * up * (sigmoid + act * (1 - sigmoid))
        return (act * up * scale, d_gate, d_hidden * scale * act), (act, up)


@dataclass(frozen=True)
class ClampedSwiGLU:
    """g * sigmoid(alpha * g) * (u + 1), with g = min(gate, limit), u = clip(up, -limit, limit).

    Values at a limit have a gradient, and those beyond it have none, as in PyTorch.

    Source:   OpenAI 2025 (2508.10925), section 2.2; `GptOssExperts` of transformers.
    """

    limit: float
    alpha: float
    sigmoid: Callable[[Any], Any] = jax.nn.sigmoid
    """As `SwiGLU.sigmoid`."""

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """`GluKernel.hidden`."""
        gate, up = self._clamped(gate, up)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)

    def gradients(self, gate: Any, up: Any, d_hidden: Any, scale: Any) -> Gradients:
        """`GluKernel.gradients`."""
        g, u = self._clamped(gate, up)
        sigmoid = self.sigmoid(self.alpha * g)
        act, value, d = g * sigmoid, u + 1, d_hidden * scale
        d_gate = d * value * (sigmoid + self.alpha * act * (1 - sigmoid))
        zero = jnp.zeros_like(d)
        made = (
            act * value * scale,
            jnp.where(gate <= self.limit, d_gate, zero),
            jnp.where(jnp.abs(up) <= self.limit, d * act, zero),
        )
        return made, (act, value)

    def _clamped(self, gate: Any, up: Any) -> tuple[Any, Any]:
        at_most = lambda x: jnp.where(x > self.limit, self.limit, x)  # noqa: E731
        return at_most(gate), jnp.where(up < -self.limit, -self.limit, at_most(up))


@dataclass(frozen=True)
class GeGLU:
    """gelu(gate) * up, with the tanh approximation of GELU.

    Source:   Shazeer 2020 (2002.05202), equation 5.
    """

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """`GluKernel.hidden`."""
        return jax.nn.gelu(gate, approximate=True) * up

    def gradients(self, gate: Any, up: Any, d_hidden: Any, scale: Any) -> Gradients:
        """`GluKernel.gradients`."""
        act, pullback = jax.vjp(lambda x: jax.nn.gelu(x, approximate=True), gate)
        d = d_hidden * scale
        return (act * up * scale, *pullback(d * up), d * act), (act, up)


# ----------------- Activations of a feed-forward without a gate: elementwise functions of one array


type Activation = Literal["silu", "gelu", "gelu_exact", "relu_squared"]


def activated(x: jax.Array, kind: Activation) -> jax.Array:
    """Apply an activation, by its name in `Glu.activation`.

    Source:   So et al. 2021 (2109.08668), section 4: the squared ReLU.
    """
    match kind:
        case "silu":
            return jax.nn.silu(x)
        case "relu_squared":
            return jnp.square(jax.nn.relu(x))
        case kind:
            return jax.nn.gelu(x, approximate=kind == "gelu")
