"""SwiGLU of a fused gate-up projection, and its gradient, each in one pass over memory.

The scale of the rows may be deferred (`norm.NormOutput`). On an H200, forward and backward of
32,768 rows of 2 x 8,192 with a scale take 375 and 633 us with the kernels, and 414 and 634 with
XLA. With the largest magnitude, they take 377 and 634 us, and 433 and 872.

Source:   Shazeer 2020 (2002.05202), equation 5.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.float8.rounding import WithAmax, max_magnitude
from jaxpar.kernels.platform import Platform, imported_when_used

hopper = imported_when_used("jaxpar.kernels.hopper.swiglu")

#: The kernels are for an F that is a multiple of this. A CTA has as many columns as divide F, up to
#: 1,024. With 256, a forward in Triton took 445 us and XLA 273 (16,384 rows of 2 x 11,008). A
#: backward that computes the largest magnitude was faster with 256 too, 450 us instead of 589,
#: because XLA reads the result again.
MIN_COLUMNS, MIN_AMAX_COLUMNS = 512, 256

LOG2_E = 1.4426950408889634


def swiglu(gate_up: jax.Array | WithAmax, scale: jax.Array | None) -> jax.Array | WithAmax:
    """Compute silu(s gate) * s up of rows [gate, up]. A `WithAmax` gives a `WithAmax`.

    Args:     scale: as in `swiglu_scaled`. None if gate_up is a `WithAmax`, because float8 matmuls
              do not defer scales.
    """
    if isinstance(gate_up, WithAmax):
        assert scale is None
        return swiglu_with_amax(gate_up)
    return swiglu_scaled(gate_up, scale)


@jax.custom_vjp
def swiglu_scaled(gate_up: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Compute silu(s gate) * s up of rows [gate, up].

    Args:     gate_up: [..., 2 F]. scale: float32 [..., 1], s of each row, without a gradient; None
              means 1.
    Returns:  [..., F], the same dtype.

    Both directions use kernels on NVIDIA GPUs since Hopper, for bfloat16 and an F that is a
    multiple of `MIN_COLUMNS`; otherwise XLA.
    """
    by = forward_by_kernel if _kernels_run(gate_up) else forward_by_xla
    return by(gate_up, scale)


def _forward(gate_up, scale):
    return swiglu_scaled(gate_up, scale), (gate_up, scale)


def _backward(saved, d_y):
    gate_up, scale = saved
    if _kernels_run(gate_up):
        return backward_by_kernel(gate_up, scale, d_y), None
    # Materialize it once for both matmuls that read it. XLA would repeat the concatenation in each.
    return lax.optimization_barrier(backward_by_xla(gate_up, scale, d_y)), None


swiglu_scaled.defvjp(_forward, _backward)


@jax.custom_vjp
def swiglu_with_amax(gate_up: WithAmax) -> WithAmax:
    """`swiglu` without a scale, where result and gradient are `WithAmax`.

    Args:     gate_up: [..., 2 F]; its largest magnitude is not read.
    Returns:  [..., F], the same dtype.

    Uses the kernels under the conditions of `swiglu_scaled`, and the backward kernel also for
    multiples of `MIN_AMAX_COLUMNS`. XLA's backward needs another pass over its result for the
    largest magnitude.
    """
    values = gate_up.values
    if _kernels_run(values):
        return forward_by_kernel(values, None, with_amax=True)
    return _with_amax_by_xla(forward_by_xla(values, None))


def _forward_with_amax(gate_up):
    return swiglu_with_amax(gate_up), gate_up.values


def _backward_with_amax(gate_up, d_y):
    if _kernels_run(gate_up, MIN_AMAX_COLUMNS):
        return (backward_by_kernel(gate_up, None, d_y.values, with_amax=True),)
    return (_with_amax_by_xla(backward_by_xla(gate_up, None, d_y.values)),)


swiglu_with_amax.defvjp(_forward_with_amax, _backward_with_amax)


def _with_amax_by_xla(x: jax.Array) -> WithAmax:
    return WithAmax(x, max_magnitude(x))


def _kernels_run(gate_up: jax.Array, fewest: int = MIN_COLUMNS) -> bool:
    F = gate_up.shape[-1] // 2
    return (
        Platform.here().runs_elementwise_kernels
        and gate_up.dtype == jnp.bfloat16
        and F % fewest == 0
    )


def forward_by_xla(gate_up, scale):
    """`swiglu_scaled`, compiled by XLA."""
    gate, up = jnp.split(_scaled(gate_up, scale), 2, axis=-1)
    return _product(gate, up).astype(gate_up.dtype)


def backward_by_xla(gate_up, scale, d_y):
    """Compute the gradient of gate_up, compiled by XLA."""
    gate, up = jnp.split(_scaled(gate_up, scale), 2, axis=-1)
    halves = _gradients(gate, up, _scaled(d_y, scale))
    return jnp.concatenate(halves, axis=-1).astype(gate_up.dtype)


def _scaled(x, scale):
    x = x.astype(jnp.float32)
    return x if scale is None else x * scale


def _product(gate, up):
    return gate * up / (1 + jnp.exp2(-LOG2_E * gate))


def _gradients(gate, up, d_y):
    share = 1 / (1 + jnp.exp2(-LOG2_E * gate))
    return d_y * up * share * (1 + gate * (1 - share)), d_y * gate * share


@functools.partial(jax.jit, static_argnames="with_amax")
def forward_by_kernel(gate_up, scale, *, with_amax=False):
    """`swiglu_scaled` or `swiglu_with_amax` as a kernel. Inside a jit, so that JAX can drop it."""
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    made = hopper.forward(_product, rows, _of_rows(scale), with_amax=with_amax)
    return _whole(made, (*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@functools.partial(jax.jit, static_argnames="with_amax")
def backward_by_kernel(gate_up, scale, d_y, *, with_amax=False):
    """`backward_by_xla` as a kernel, with the largest magnitude if `with_amax`."""
    rows, d_rows = (a.reshape(-1, a.shape[-1]) for a in (gate_up, d_y))
    made = hopper.backward(_gradients, rows, _of_rows(scale), d_rows, with_amax=with_amax)
    return _whole(made, gate_up.shape)


def _of_rows(scale):
    return None if scale is None else scale.reshape(-1)


def _whole(made, shape):
    """Reshape a kernel's result. If it comes with largest magnitudes, return a `WithAmax`."""
    values = made[0].reshape(shape)
    return values if len(made) == 1 else WithAmax(values, jnp.max(made[1]))
