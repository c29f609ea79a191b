"""SwiGLU and its gradient by XLA against autodiff, and which rows the kernels take.

`test_elementwise_hopper.py` interprets and lowers the kernels.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels import swiglu
from jaxpar.kernels.float8.rounding import WithAmax, without_amax
from jaxpar.kernels.platform import Platform, compiling_for
from tests.slow import slow


def draw(*shape: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def arguments(rows: int, F: int, dtype, scaled: bool) -> tuple[jax.Array, ...]:
    """gate_up, scale, and the gradient of the result."""
    scale = 0.5 + jax.random.uniform(jax.random.key(1), (2, rows // 2, 1)) if scaled else None
    shape = 2, rows // 2
    return 2 * draw(*shape, 2 * F, dtype=dtype), scale, draw(*shape, F, seed=2, dtype=dtype)


def plain(gate_up, scale):
    """In float32, left to autodiff."""
    gate_up = gate_up.astype(jnp.float32) * (1 if scale is None else scale)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


@pytest.mark.parametrize(
    ("scaled", "dtype"),
    [(False, "float32"), (True, "bfloat16"), slow(False, "bfloat16"), slow(True, "float32")],
)
def test_the_gradient_is_that_of_autodiff(scaled, dtype):
    dtype = jnp.dtype(dtype)
    gate_up, scale, d_y = arguments(6, 4, dtype, scaled)
    found, vjp = jax.vjp(lambda a: swiglu.swiglu(a, scale), gate_up)
    wanted, autodiff = jax.vjp(lambda a: plain(a, scale), gate_up.astype(jnp.float32))
    (gradient,), (of_plain,) = vjp(d_y), autodiff(d_y.astype(jnp.float32))
    # In bfloat16 both are the float32 numbers, rounded once.
    rtol = 1e-5 if dtype == jnp.float32 else 2**-8
    for a, b in ((found, wanted), (gradient, of_plain)):
        assert (a.dtype, a.shape) == (dtype, b.shape)
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=rtol, atol=1e-6)


def assert_measured(found, values):
    """The same array, and its largest magnitude as it is rounded."""
    assert found.dtype == values.dtype
    same, values = (np.asarray(a, np.float32) for a in (found.values, values))
    np.testing.assert_array_equal(same, values)
    assert found.amax.dtype == jnp.float32 and found.amax.shape == ()
    np.testing.assert_array_equal(found.amax, np.max(np.abs(values)))


def test_measured_it_is_the_same_and_so_is_its_gradient():
    """Left to XLA. Nobody reads the largest that comes in."""
    gate_up, _, d_y = arguments(6, 4, jnp.bfloat16, scaled=False)
    found, vjp = jax.vjp(swiglu.swiglu_with_amax, WithAmax(gate_up, jnp.float32(np.nan)))
    wanted, plain_vjp = jax.vjp(lambda a: swiglu.swiglu(a, None), gate_up)
    assert_measured(found, wanted)
    (gradient,) = vjp(WithAmax(d_y, jnp.float32(0)))
    assert_measured(gradient, plain_vjp(d_y)[0])


def test_far_from_zero_there_are_numbers():
    """silu(-1000) is 0, and silu(1000) is 1000; their slopes are 0 and 1."""
    gate_up, one = jnp.asarray([[-1000.0, 1000.0, 3.0, 3.0]]), jnp.ones((1, 2))
    found, vjp = jax.vjp(lambda a: swiglu.swiglu(a, None), gate_up)
    np.testing.assert_array_equal(found, [[0, 3000]])
    np.testing.assert_array_equal(vjp(one)[0], [[0, 3, 0, 1000]])


@pytest.mark.parametrize(
    ("F", "dtype", "by"),
    [
        (14336, jnp.bfloat16, "kernel"),
        (7168, jnp.bfloat16, "kernel"),
        (8192, jnp.float32, "XLA"),
        (3584, jnp.bfloat16, "kernel"),
        (11008, jnp.bfloat16, "XLA"),
        (8000, jnp.bfloat16, "XLA"),
    ],
    ids=["8B", "over tensor", "float32", "over tensor 4", "2 7B", "columns"],
)
def test_the_kernels_are_for_gpus_and_some_shapes(F, dtype, by):
    gate_up = jax.ShapeDtypeStruct((2, 16, 2 * F), dtype)
    d_y = jax.ShapeDtypeStruct((2, 16, F), dtype)

    def kernels() -> int:
        run = lambda a, d: jax.vjp(lambda a: swiglu.swiglu(a, None), a)[1](d)  # noqa: E731
        return str(jax.make_jaxpr(run)(gate_up, d_y)).count("mpmd_map[")

    assert kernels() == 0
    with compiling_for(Platform("gpu", "NVIDIA H200", "9.0")):
        assert kernels() == 2 * (by == "kernel")
    with compiling_for(Platform("gpu", "NVIDIA L40S", "8.9")):
        assert kernels() == 0


@pytest.mark.parametrize(("F", "calls"), [(14336, 2), (11008, 1), (8000, 0)])
def test_measured_the_backward_is_a_kernel_for_more_shapes(F, calls):
    def run(values, d_y):
        vjp = jax.vjp(swiglu.swiglu_with_amax, without_amax(values))[1]
        return vjp(without_amax(d_y))

    sizes = (2, 16, 2 * F), (2, 16, F)
    with compiling_for(Platform("gpu", "NVIDIA H200", "9.0")):
        jaxpr = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes))
    assert str(jaxpr).count("mpmd_map[") == calls
