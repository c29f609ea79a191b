"""RMS norm's written-out backward, by XLA and by the kernel (interpreted), against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels import norm
from jaxpar.kernels.platform import Platform, compiling_for
from tests.slow import slow_but

EPS = 1e-5


def draw(*shape: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def beside(x, gain):
    """x and its norm, as the model takes them."""
    x, normed = norm.rms_norm_beside(x, gain, EPS)
    return x, normed.written()


def plain(x, gain):
    """x and its norm, left to autodiff."""
    return x, x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * gain


def behind(x, gain, w):
    """x, and the product of its norm, the rows scaled behind the matmul."""
    x, unscaled = norm.rms_norm_unscaled(x, gain, EPS)
    return x, unscaled.scaled(unscaled.operand @ w)


def backward_arguments(rows: int, length: int, dtype) -> tuple[jax.Array, ...]:
    """Of `by_xla`: x, gain, scale, and the gradients of the norm and of x from elsewhere."""
    x, d_y, d_beside = (draw(2, rows // 2, length, seed=i, dtype=dtype) for i in range(3))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + EPS)
    return x, 1 + 0.1 * draw(length, seed=3), scale, d_y, d_beside


def test_gradients_are_those_of_autodiff():
    x, gain, cotangents = draw(2, 3, 16), draw(16, seed=1), (draw(2, 3, 16), draw(2, 3, 16, seed=5))
    found, wanted = (jax.vjp(f, x, gain) for f in (beside, plain))
    for a, b in zip(jax.tree.leaves(found[0]), wanted[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    for a, b in zip(found[1](cotangents), wanted[1](cotangents), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    alone = jax.vjp(lambda x, gain: norm.rms_norm(x, gain, EPS), x, gain)[1](cotangents[1])
    without = wanted[1]((jnp.zeros_like(x), cotangents[1]))
    for a, b in zip(alone, without, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_rows_scaled_behind_the_matmul_give_the_same():
    x, gain, w, y = draw(2, 3, 16), draw(16, seed=1), draw(16, 8, seed=2), draw(2, 3, 8, seed=3)

    def wanted(x, gain, w):
        x, h = plain(x, gain)
        return x, h @ w

    found, wanted = (jax.vjp(f, x, gain, w) for f in (behind, wanted))
    for a, b in zip(found[0], wanted[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(found[1]((x, y)), wanted[1]((x, y)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("unscaled", [False, True])
def test_the_sum_of_both_gradients_is_rounded_once(unscaled):
    arguments = backward_arguments(8, 64, jnp.bfloat16)
    x, gain, scale, d_y, d_beside = (a.astype(jnp.float32) for a in arguments)
    wanted = norm.by_xla(x, gain, scale, d_y, d_beside, unscaled=unscaled)[0]
    found = norm.by_xla(*arguments, unscaled=unscaled)[0]
    np.testing.assert_array_equal(found, wanted.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("rows", "length", "unscaled", "dtype"),
    slow_but(
        [(2, 128, True, "float32"), (32, 256, False, "bfloat16"), (96, 128, False, "float32")],
        [
            (*size, unscaled, dtype)
            for size in [(2, 128), (32, 256), (96, 128)]
            for unscaled in (False, True)
            for dtype in ("float32", "bfloat16")
        ],
    ),
)
def test_the_kernel_computes_the_same(rows, length, unscaled, dtype):
    """One program of few rows, and several programs, whose sums for the gain are added up."""
    dtype = jnp.dtype(dtype)
    arguments = backward_arguments(rows, length, dtype)
    found = norm.by_kernel(*arguments, unscaled=unscaled, rows=min(rows, 16), interpret=True)
    for a, b in zip(found, norm.by_xla(*arguments, unscaled=unscaled), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        # Sums in another order; in bfloat16 that is a last digit, now and then.
        near = np.isclose(a, b, rtol=2e-6, atol=2e-6)
        assert near.mean() > 0.999
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=2e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "by"),
    [
        ((2, 16, 4096), jnp.bfloat16, "kernel"),
        ((2, 16, 2048), jnp.bfloat16, "kernel"),
        ((2, 16, 4096), jnp.float32, "XLA"),
        ((2, 16, 5120), jnp.bfloat16, "XLA"),
        ((3, 7, 4096), jnp.bfloat16, "XLA"),
    ],
    ids=["8B", "1.5B", "float32", "length", "rows"],
)
def test_the_kernel_is_for_gpus_and_some_shapes(shape, dtype, by):
    x, gain = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[-1:], jnp.float32)

    def kernels() -> int:
        def gradients(x, gain, d_x, d_y):
            return jax.vjp(beside, x, gain)[1]((d_x, d_y))

        def gradients_unscaled(x, gain, d_x, d_y):
            (x, u), back = jax.vjp(lambda x, g: norm.rms_norm_unscaled(x, g, EPS), x, gain)
            return back((d_x, u.replace(operand=d_y)))

        texts = (str(jax.make_jaxpr(f)(x, gain, x, x)) for f in (gradients, gradients_unscaled))
        return sum(text.count("pallas_call") for text in texts)

    assert kernels() == 0
    with compiling_for(Platform("gpu", "NVIDIA H200", "9.0")):
        assert kernels() == 2 * (by == "kernel")


def test_the_kernel_keeps_nothing_that_the_backward_does_not_read():
    """Of a layer that is computed again: its input alone."""
    x = jax.ShapeDtypeStruct((2, 16, 4096), jnp.bfloat16)
    gain = jax.ShapeDtypeStruct((4096,), jnp.float32)
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)

    def kept() -> tuple[list[str], bool]:
        @jax.checkpoint
        def layer(x, gain, w):
            x, h = beside(x, gain)
            return x + h @ w

        backward = jax.make_jaxpr(lambda x, gain, w, dy: jax.vjp(layer, x, gain, w)[1](dy))
        (again,) = [e for e in backward(x, gain, w, x).eqns if e.primitive.name == "remat2"]
        return sorted(str(v.aval) for v in again.invars), "pallas_call" in str(again)

    by_xla, _ = kept()
    with compiling_for(Platform("gpu", "NVIDIA H200", "9.0")):
        assert kept() == (by_xla, True)
    assert sum("4096]" in name and "[2,16" in name for name in by_xla) == 2  # x, and the gradient
