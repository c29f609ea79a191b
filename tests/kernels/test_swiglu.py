"""SwiGLU and its gradient, by XLA and by the kernels (interpreted), against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels import swiglu
from jaxpar.kernels.platform import Platform, compiling_for


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("scaled", [False, True], ids=["as they are", "scaled"])
def test_the_gradient_is_that_of_autodiff(scaled, dtype):
    gate_up, scale, d_y = arguments(6, 4, dtype, scaled)
    found, vjp = jax.vjp(lambda a: swiglu.swiglu(a, scale), gate_up)
    wanted, autodiff = jax.vjp(lambda a: plain(a, scale), gate_up.astype(jnp.float32))
    (gradient,), (of_plain,) = vjp(d_y), autodiff(d_y.astype(jnp.float32))
    # In bfloat16 both are the float32 numbers, rounded once.
    rtol = 1e-5 if dtype == jnp.float32 else 2**-8
    for a, b in ((found, wanted), (gradient, of_plain)):
        assert (a.dtype, a.shape) == (dtype, b.shape)
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("scaled", [False, True], ids=["as they are", "scaled"])
@pytest.mark.parametrize(("rows", "F"), [(2, 128), (6, 384)])
def test_the_kernels_compute_the_same(rows, F, scaled, dtype):
    gate_up, scale, d_y = arguments(rows, F, dtype, scaled)
    how = dict(columns=128, interpret=True)
    pairs = (
        (swiglu.forward_by_kernel(gate_up, scale, **how), swiglu.forward_by_xla(gate_up, scale)),
        (
            swiglu.backward_by_kernel(gate_up, scale, d_y, **how),
            swiglu.backward_by_xla(gate_up, scale, d_y),
        ),
    )
    for found, wanted in pairs:
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        found, wanted = (np.asarray(a, np.float32) for a in (found, wanted))
        rtol = 1e-5 if dtype == jnp.float32 else 2**-7
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=1e-6)


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
        (8000, jnp.bfloat16, "XLA"),
    ],
    ids=["8B", "over tensor", "float32", "columns"],
)
def test_the_kernels_are_for_gpus_and_some_shapes(F, dtype, by):
    gate_up = jax.ShapeDtypeStruct((2, 16, 2 * F), dtype)
    d_y = jax.ShapeDtypeStruct((2, 16, F), dtype)

    def kernels() -> int:
        run = lambda a, d: jax.vjp(lambda a: swiglu.swiglu(a, None), a)[1](d)  # noqa: E731
        return str(jax.make_jaxpr(run)(gate_up, d_y)).count("pallas_call")

    assert kernels() == 0
    with compiling_for(Platform("gpu", "NVIDIA H200", "9.0")):
        assert kernels() == 2 * (by == "kernel")
    with compiling_for(Platform("gpu", "Tesla V100", "7.0")):
        assert kernels() == 0
