"""float8 on a GPU: the products that cuBLAS makes, and numbers that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels import float8, norm
from jaxpar.kernels.float8 import reference, rounding

pytestmark = pytest.mark.gpu

TOKENS, IN, OUT = 4096, 1024, 2048


def products(x, w, dy, scaling: str):
    """Output, gradient of x and gradient of w."""

    def multiply(x, w):
        scale = float8.power_of_two_scale(float8.max_magnitude(w), float8.FORWARD)
        return float8.matmul(x, [float8.quantize_weight(w, scale, scaling)], "x")[0]

    y, vjp = jax.vjp(multiply, x, w)
    return y, *vjp(dy)


def example():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes, stds = [(TOKENS, IN), (IN, OUT), (TOKENS, OUT)], [1.0, 0.02, 1e-5]
    draw = lambda key, shape, std: (std * jax.random.normal(key, shape)).astype(jnp.bfloat16)  # noqa: E731
    return list(map(draw, keys, shapes, stds))


def relative_error(found, wanted) -> float:
    found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_products_are_the_references(scaling):
    """To a result's bfloat16 (1.7e-3), and for the output also to Hopper's short sums."""
    x, w, dy = example()
    found = jax.jit(products, static_argnums=3)(x, w, dy, scaling)
    with jax.default_matmul_precision("highest"):
        wanted = reference.products(*(a.astype(jnp.float32) for a in (x, w, dy)), scaling)
    for a, b, bound in zip(found, wanted, (1e-2, 3e-3, 3e-3), strict=True):
        assert relative_error(a, b) < bound


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_cublas_multiplies_8_bit_operands(scaling):
    lowered = jax.jit(products, static_argnums=3).lower(*example(), scaling)
    compiled = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    calls = compiled.as_text().count('custom_call_target="__cublas$lt$matmul$f8"')
    assert calls == (3 if scaling == "tensor" else 2)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows(scaling, bad):
    """The conversion instruction clips; the scale must have seen to it before."""
    x, w, dy = example()
    run = jax.jit(products, static_argnums=3)
    y, _, d_w = run(x.at[3, 5].set(bad), w, dy, scaling)
    assert np.isnan(y[3]).all() and not np.isfinite(d_w[5]).any()
    y, d_x, _ = run(x, w.at[5, 7].set(bad), dy, scaling)
    assert np.isnan(y[:, 7]).all() and np.isnan(d_x[:, 5]).all()
    _, d_x, d_w = run(x, w, dy.at[3, 7].set(bad), scaling)
    assert np.isnan(d_x[3]).all() and not np.isfinite(d_w[:, 7]).any()


@pytest.mark.usefixtures("elementwise_kernels")
@pytest.mark.parametrize("dtype", [float8.FORWARD, float8.BACKWARD], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("std", [1e-9, 1.0])
@pytest.mark.parametrize("shape", [(1024, 2048), (16384, 14336), (128, 128)], ids=str)
def test_the_kernel_gives_the_bits_of_xla(shape, dtype, std):
    """Subnormals, the largest numbers and the smallest among them."""
    x = std * jax.random.normal(jax.random.key(0), shape)
    x = (x * jnp.exp(6 * jax.random.normal(jax.random.key(1), x.shape))).astype(jnp.bfloat16)
    scale = float8.power_of_two_scale(float8.max_magnitude(x), dtype)
    same_bits_by_kernel_and_xla(x, scale, dtype)


@pytest.mark.usefixtures("elementwise_kernels")
@pytest.mark.parametrize("shape", [(1024, 2048), (16384, 4096)], ids=str)
def test_the_kernel_gives_the_bits_of_xla_for_a_norm(shape):
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    gain = 1 + 0.1 * jax.random.normal(jax.random.key(1), shape[1:])
    _, normed = norm.rms_norm_beside(x, gain, 1e-5)
    scale = float8.power_of_two_scale(float8.max_magnitude(normed.unrounded()), float8.FORWARD)
    same_bits_by_kernel_and_xla(normed, scale, float8.FORWARD)


def same_bits_by_kernel_and_xla(x, scale, dtype):
    wanted = jax.jit(rounding._by_xla, static_argnums=2)(x, scale, dtype)
    for a, b in zip(rounding._by_kernel(x, scale, dtype), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
