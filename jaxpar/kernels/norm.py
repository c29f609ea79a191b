"""RMSNorm, whose rows a later matmul may scale, and its backward.

XLA compiles it. In the backward, it reads the input and the output's gradient twice: once for a
row's mean and once for the gradients. For 16,384 rows of 4,096 on an H200, this takes 213 us; the
memory bandwidth allows 129 us.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

#: Remat name of the scale of each row, which every policy saves: it is small, and computing it
#: needs a pass over memory.
SCALE = "norm_scale"


@flax.struct.dataclass
class Unmaterialized:
    """An unmaterialized norm: the inputs of a norm, for a reader that computes the output itself.

    This is a `float8.Operand`. In its gradient, `x` is the gradient of the output array, and the
    other fields are None.
    """

    x: Any
    """[..., D]."""
    scale: Any
    """float32 [..., 1], of each row."""
    gain: Any
    """[D]."""
    top: Any
    """float32 [..., 1]: the largest magnitude of each row before scaling, for a reader that rounds.
    The pass that sums squares computes it."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def dtype(self) -> Any:
        return self.x.dtype

    def rows(self) -> "Unmaterialized":
        """Reshape to a matrix."""
        x, (scale, top) = self.x, (a.reshape(-1, 1) for a in (self.scale, self.top))
        return Unmaterialized(x.reshape(-1, x.shape[-1]), scale, self.gain, top)

    def written(self) -> jax.Array:
        """Materialize the output, in x's dtype."""
        return _written(self)

    def unrounded(self) -> jax.Array:
        """Compute the output in float32, before rounding to x's dtype. Not differentiable."""
        return _normed(self.x, self.scale, self.gain)

    def max_magnitude(self) -> jax.Array:
        """Compute the largest magnitude of `unrounded`, float32. NaN if there is a NaN.

        The last digits may differ, because the product is rounded in another order.
        """
        return jnp.max(self.top * self.scale)

    def readable(self) -> "Unmaterialized":
        return self

    def gradient(self, d_x: jax.Array) -> "Unmaterialized":
        return Unmaterialized(d_x, None, None, None)


def _normed(x, scale, gain):
    return x.astype(jnp.float32) * scale * gain


@jax.custom_vjp
def _written(n: Unmaterialized) -> jax.Array:
    return n.unrounded().astype(n.dtype)


_written.defvjp(
    lambda n: (_written(n), None), lambda _, d_y: (Unmaterialized(d_y, None, None, None),)
)


@flax.struct.dataclass
class NormOutput:
    """A norm in the form in which matmuls receive it.

    The scale of each row may be deferred: the matmul multiplies the unscaled operand, and an
    existing pass that reads the product scales its rows. A single pass can then add to the residual
    stream, sum squares and write the operand. Writing the scaled output needs a second pass, since
    a row's scale is known only after the complete row has been read.

    Source:   Graef et al. 2024 (2407.09577), FlashNorm: the scale after the matmul.
    """

    operand: Any
    """[..., D]: an array, or for float8 `Unmaterialized`."""
    scale: Any = None
    """float32 [..., 1]: the deferred scale of each row of a product, without a gradient. None if
    the operand is scaled."""

    def array(self) -> jax.Array:
        """Return the operand as an array, which is written if it is unmaterialized."""
        return self.operand.written() if isinstance(self.operand, Unmaterialized) else self.operand

    def whole(self) -> jax.Array:
        """Return the norm itself, with its deferred scale."""
        return self.scaled(self.array())

    def scaled(self, product: jax.Array) -> jax.Array:
        """Apply the deferred scale to a product of the operand. Returns the product's dtype."""
        if self.scale is None:
            return product
        scale = lax.stop_gradient(self.scale)
        return (product.astype(jnp.float32) * scale).astype(product.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """Apply RMSNorm over the last dim, in float32. Returns x's dtype.

    The custom backward reads the scale of each row, which every remat policy saves: four bytes per
    row instead of another pass over x.

    Args:     x: [..., D]. gain: [D].
    Source:   Zhang & Sennrich 2019 (1910.07467), equation 4.
    """
    return _forward(x, gain, eps)[0]


def _forward(x, gain, eps):
    scale = _scale(x, eps)
    return _normed(x, scale, gain).astype(x.dtype), (x, gain, scale)


def _scale(x, eps):
    mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return checkpoint_name(lax.rsqrt(mean_square + eps), SCALE)


def _backward(eps, saved, d_y):
    x, gain, scale = saved
    return gradients(x, gain, scale, d_y, None)


rms_norm.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm_beside(x: jax.Array, gain: jax.Array, eps: float) -> tuple[jax.Array, Unmaterialized]:
    """Return x and `rms_norm` of x, for an x that is also used elsewhere, as in a residual stream.

    Args:     as `rms_norm`.

    The backward adds the gradients of both in float32 and rounds the sum once.
    """
    return _beside_forward(x, gain, eps)[0]


def _beside_forward(x, gain, eps):
    scale = _scale(x, eps)
    top = jnp.max(jnp.abs(x.astype(jnp.float32) * gain), axis=-1, keepdims=True)
    return (x, Unmaterialized(x, scale, gain, top)), (x, gain, scale)


def _beside_backward(eps, saved, cotangents):
    d_beside, d_normed = cotangents
    x, gain, scale = saved
    return gradients(x, gain, scale, d_normed.x, d_beside)


rms_norm_beside.defvjp(_beside_forward, _beside_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm_unscaled(x: jax.Array, gain: jax.Array, eps: float) -> tuple[jax.Array, NormOutput]:
    """`rms_norm_beside` with a deferred scale. Not for float16, whose range values may exceed.

    Args:     as `rms_norm`.
    """
    return _unscaled_forward(x, gain, eps)[0]


def _unscaled_forward(x, gain, eps):
    scale = _scale(x, eps)
    values = (x.astype(jnp.float32) * gain).astype(x.dtype)
    return (x, NormOutput(values, scale)), (x, gain, scale)


def _unscaled_backward(eps, saved, cotangents):
    d_beside, d_unscaled = cotangents
    x, gain, scale = saved
    return gradients(x, gain, scale, d_unscaled.operand, d_beside, unscaled=True)


rms_norm_unscaled.defvjp(_unscaled_forward, _unscaled_backward)


def gradients(x, gain, scale, d_y, d_beside, *, unscaled=False):
    """Compute the gradients of x and gain.

    Args:     x, d_y: [..., D]. gain: [D]. scale: float32 [..., 1]. d_beside: other gradient of x,
              or None. unscaled: d_y is the gradient of an unscaled `NormOutput.operand`.
    """
    wide_x, d_values = x.astype(jnp.float32), d_y.astype(jnp.float32)
    if not unscaled:
        d_values *= scale
    d_x = d_values * gain
    d_x -= wide_x * (scale * scale * jnp.mean(d_x * wide_x, -1, keepdims=True))
    d_gain = d_values * wide_x
    if d_beside is not None:
        d_x += d_beside.astype(jnp.float32)
    d_gain = jnp.sum(d_gain, axis=tuple(range(x.ndim - 1)))
    return d_x.astype(x.dtype), d_gain.astype(gain.dtype)


# ---------------------------- LayerNorm: rows with mean 0 and variance 1, times a gain, plus a bias


@jax.named_scope("norm")
def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Apply LayerNorm over the last dim, in float32. Returns x's dtype.

    Every remat policy saves the mean and the scale of each row, as it does for RMSNorm.

    Args:     x: [..., D]. gain, bias: [D].
    Source:   Ba et al. 2016 (1607.06450), equation 4.
    """
    wide = x.astype(jnp.float32)
    mean = checkpoint_name(jnp.mean(wide, axis=-1, keepdims=True), SCALE)
    centered = wide - mean
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    scale = checkpoint_name(lax.rsqrt(variance + eps), SCALE)
    return (centered * scale * gain + bias).astype(x.dtype)
