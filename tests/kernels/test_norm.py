"""RMS norm's written-out backward against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels import norm

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
    """Of `gradients`: x, gain, scale, and the gradients of the norm and of x from elsewhere."""
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
    wanted = norm.gradients(x, gain, scale, d_y, d_beside, unscaled=unscaled)[0]
    found = norm.gradients(*arguments, unscaled=unscaled)[0]
    np.testing.assert_array_equal(found, wanted.astype(jnp.bfloat16))


def test_the_backward_keeps_nothing_that_it_does_not_read():
    """Of a layer that is computed again: its input alone."""
    x = jax.ShapeDtypeStruct((2, 16, 4096), jnp.bfloat16)
    gain = jax.ShapeDtypeStruct((4096,), jnp.float32)
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)

    @jax.checkpoint
    def layer(x, gain, w):
        x, h = beside(x, gain)
        return x + h @ w

    backward = jax.make_jaxpr(lambda x, gain, w, dy: jax.vjp(layer, x, gain, w)[1](dy))
    (again,) = [e for e in backward(x, gain, w, x).eqns if e.primitive.name == "remat2"]
    kept = [str(v.aval) for v in again.invars]
    assert sum("4096]" in name and "[2,16" in name for name in kept) == 2  # x, and the gradient
