"""Root-mean-square norm, and its backward in one pass over memory.

XLA reads the input and the output's gradient twice, once for a row's mean and once for the
gradients. The kernel keeps a row in registers in between, adds the gradient that the input has from
elsewhere, and adds up the gain's gradient over the rows of a program: 166 us for 16,384 rows of
4,096 on an H200, XLA's two passes 213, where the memory's bandwidth allows 129.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxpar.kernels.platform import Platform

#: Name of what every remat policy saves: a row's scale, too small to be worth the pass over memory
#: that it takes.
SCALE = "norm_scale"

#: Rows of a program, and the warps that work on it: the fastest of those measured.
ROWS, WARPS = 32, 16

#: Lengths of a row for which it is faster.
LENGTHS = (2048, 4096, 8192)


@flax.struct.dataclass
class Unmaterialized:
    """A norm's output as what it is computed from, for a reader that computes it on the way. A
    `float8.Operand`.

    Its gradient is that of the whole array, and lies in the place of `x`; the others have none.
    """

    x: Any
    """[..., D]."""
    scale: Any
    """float32 [..., 1], of each row."""
    gain: Any
    """[D]."""
    top: Any
    """float32 [..., 1]: the largest magnitude of each row before it is scaled, for a reader that
    rounds: the pass that sums squares finds it."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def dtype(self) -> Any:
        return self.x.dtype

    def rows(self) -> "Unmaterialized":
        """The same as one matrix."""
        x, (scale, top) = self.x, (a.reshape(-1, 1) for a in (self.scale, self.top))
        return Unmaterialized(x.reshape(-1, x.shape[-1]), scale, self.gain, top)

    def written(self) -> jax.Array:
        """The output, in x's dtype."""
        return _written(self)

    def unrounded(self) -> jax.Array:
        """The output in float32, before it is rounded to x's dtype. Not for gradients."""
        return _normed(self.x, self.scale, self.gain)

    def max_magnitude(self) -> jax.Array:
        """The largest magnitude of `unrounded`, float32, but for its last digits: the product is
        rounded in another order. NaN where there is one."""
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
    """What a matmul is given of a norm.

    Its rows may be yet to be scaled: the operand goes through the matmul, and the product is scaled
    where it is read, by a pass that there is anyway. So one pass sums the residual stream and
    squares, and writes the operand; to write the output takes a second, since a row's scale is
    known when the row has been read.

    Source:   Graef et al. 2024 (2407.09577), FlashNorm: the scale after the matmul.
    """

    operand: Any
    """[..., D]: an array; or, for float8 alone, `Unmaterialized`."""
    scale: Any = None
    """float32 [..., 1]: what each row of a product is yet to be multiplied by, without a gradient.
    None: nothing."""

    def scaled(self, product: jax.Array) -> jax.Array:
        """A product of the operand, as one of the norm's output; its dtype out."""
        if self.scale is None:
            return product
        scale = lax.stop_gradient(self.scale)
        return (product.astype(jnp.float32) * scale).astype(product.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last dim, in float32; x's dtype out.

    Its backward is written out so that it finds the scale of each row saved, whatever the remat
    policy: four bytes a row, in place of one more pass over x.

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
    return by_xla(x, gain, scale, d_y, None)


rms_norm.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm_beside(x: jax.Array, gain: jax.Array, eps: float) -> tuple[jax.Array, Unmaterialized]:
    """x, and `rms_norm` of it: where x goes on beside its norm, as in a residual stream.

    Args:     as `rms_norm`.

    The backward adds the gradients of both in float32, and rounds their sum once. It is a Triton
    kernel on NVIDIA GPUs since Ampere, for bfloat16 rows of `LENGTHS` if `ROWS` divides their
    number; else it is left to XLA.
    """
    return _beside_forward(x, gain, eps)[0]


def _beside_forward(x, gain, eps):
    scale = _scale(x, eps)
    top = jnp.max(jnp.abs(x.astype(jnp.float32) * gain), axis=-1, keepdims=True)
    return (x, Unmaterialized(x, scale, gain, top)), (x, gain, scale)


def _beside_backward(eps, saved, cotangents):
    d_beside, d_normed = cotangents
    return _gradients(saved, d_normed.x, d_beside, unscaled=False)


rms_norm_beside.defvjp(_beside_forward, _beside_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm_unscaled(x: jax.Array, gain: jax.Array, eps: float) -> tuple[jax.Array, NormOutput]:
    """`rms_norm_beside`, the norm being left unscaled. Not for float16, whose range it may leave.

    Args:     as `rms_norm`.
    """
    return _unscaled_forward(x, gain, eps)[0]


def _unscaled_forward(x, gain, eps):
    scale = _scale(x, eps)
    values = (x.astype(jnp.float32) * gain).astype(x.dtype)
    return (x, NormOutput(values, scale)), (x, gain, scale)


def _unscaled_backward(eps, saved, cotangents):
    d_beside, d_unscaled = cotangents
    return _gradients(saved, d_unscaled.operand, d_beside, unscaled=True)


rms_norm_unscaled.defvjp(_unscaled_forward, _unscaled_backward)


def _gradients(saved, d_y, d_beside, *, unscaled: bool):
    x, gain, scale = saved
    by = by_kernel if _kernel_fits(x) and _kernel_runs_on(Platform.here()) else by_xla
    return by(x, gain, scale, d_y, d_beside, unscaled=unscaled)


def _kernel_fits(x: jax.Array) -> bool:
    length = x.shape[-1]
    return x.dtype == jnp.bfloat16 and length in LENGTHS and x.size // length % ROWS == 0


def _kernel_runs_on(platform: Platform) -> bool:
    return platform.name == "gpu" and float(platform.compute_capability) >= 8.0


def by_xla(x, gain, scale, d_y, d_beside, *, unscaled=False):
    """The gradients of x and gain.

    Args:     x, d_y: [..., D]. gain: [D]. scale: float32 [..., 1]. d_beside: as x, or None for
              none. unscaled: d_y is the gradient of `NormOutput.operand`, unscaled.
    """
    d_x, d_gain = _of_rows(x, gain, scale, d_y, unscaled, lambda a: jnp.mean(a, -1, keepdims=True))
    if d_beside is not None:
        d_x += d_beside.astype(jnp.float32)
    d_gain = jnp.sum(d_gain, axis=tuple(range(x.ndim - 1)))
    return d_x.astype(x.dtype), d_gain.astype(gain.dtype)


def _of_rows(x, gain, scale, d_y, unscaled, mean):
    """The gradient of x, and each row's part of the gain's; float32."""
    x, d_values = x.astype(jnp.float32), d_y.astype(jnp.float32)
    if not unscaled:
        d_values *= scale
    d_x = d_values * gain
    return d_x - x * (scale * scale * mean(d_x * x)), d_values * x


@functools.partial(jax.jit, static_argnames=("unscaled", "rows", "warps", "interpret"))
def by_kernel(
    x, gain, scale, d_y, d_beside, *, unscaled=False, rows=ROWS, warps=WARPS, interpret=False
):
    """`by_xla`. A jit, as in `kernels/float8/quantize_transpose.py`: a lone pallas_call would be
    kept."""
    n, D = x.size // x.shape[-1], x.shape[-1]
    flat = lambda a: a.reshape(n, D)  # noqa: E731
    varying = jax.typeof(x).manual_axis_type
    out = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)  # noqa: E731
    tile = pl.BlockSpec((rows, D), lambda i: (i, 0))
    d_x, d_gain = pl.pallas_call(
        functools.partial(_kernel, rows=rows, unscaled=unscaled),
        grid=(n // rows,),
        in_specs=[
            tile,
            pl.BlockSpec((D,), lambda i: (0,)),
            pl.BlockSpec((rows,), lambda i: (i,)),
            tile,
            tile,
        ],
        out_specs=[tile, pl.BlockSpec((1, D), lambda i: (i, 0))],
        out_shape=[out(x.dtype, n, D), out(jnp.float32, n // rows, D)],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        name="rms_norm_backward",
        interpret=interpret,
    )(flat(x), gain.astype(jnp.float32), scale.reshape(n), flat(d_y), flat(d_beside))
    return d_x.reshape(x.shape), jnp.sum(d_gain, axis=0).astype(gain.dtype)


def _kernel(x_ref, gain_ref, scale_ref, d_y_ref, d_beside_ref, d_x_ref, d_gain_ref, **static):
    rows, unscaled, gain = static["rows"], static["unscaled"], gain_ref[...]
    mean = lambda a: jnp.sum(a) / a.size  # noqa: E731
    load = lambda i: (x_ref[i], d_y_ref[i], d_beside_ref[i], scale_ref[i])  # noqa: E731

    def row(i, carry):
        d_gain, (x, d_y, d_beside, scale) = carry
        following = load(jnp.minimum(i + 1, rows - 1))  # on its way while this row is summed
        d_x, more = _of_rows(x, gain, scale, d_y, unscaled, mean)
        d_x_ref[i] = (d_x + d_beside.astype(jnp.float32)).astype(d_x_ref.dtype)
        return d_gain + more, following

    d_gain_ref[0] = lax.fori_loop(0, rows, row, (jnp.zeros_like(gain), load(0)))[0]
