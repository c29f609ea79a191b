"""float8 against the same arithmetic written out in float32, and against exact products."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpar.kernels import float8, norm
from jaxpar.kernels.float8 import reference
from tests.slow import slow
from tests.step.program_hashes import for_h200

FORMATS = {
    "e4m3": (float8.FORWARD, reference.E4M3, ml_dtypes.float8_e4m3fn),
    "e5m2": (float8.BACKWARD, reference.E5M2, ml_dtypes.float8_e5m2),
}

#: Root mean square of a rounding's relative error: the spacing over sqrt(12), over numbers whose
#: magnitudes are spread evenly in the logarithm, weighted by their squares as an L2 norm does.
#: A spacing is 2^-3 or 2^-2 of the power of two below; sqrt(2 ln 2 / 3) is the mean over an octave.
OCTAVE = np.sqrt(2 * np.log(2) / 3)
RMS = {name: 2.0 ** -form[1][0] / np.sqrt(12) * OCTAVE for name, form in FORMATS.items()}


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> jax.Array:
    return std * jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def scaled(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    scale = float8.power_of_two_scale(float8.max_magnitude(x), dtype)
    return float8.quantize(x, scale, dtype), scale


def relative_error(found, wanted) -> float:
    """Norm of the difference by the norm of what was wanted."""
    found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


# ------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("std", [1e-12, slow(1.0), slow(1e6)])
def test_rounding_is_the_reference_bit_for_bit(form, std):
    dtype, plain, _ = FORMATS[form]
    x = normal(64, 64, std=std) * jnp.exp(6 * normal(64, 64, seed=1))  # subnormals, too
    q, scale = jax.jit(scaled, static_argnums=1)(x, dtype)
    np.testing.assert_array_equal(
        q.astype(jnp.float32) / scale, reference.round_to_float8(x, plain)
    )


@pytest.mark.parametrize("form", FORMATS)
def test_error_is_at_most_half_a_spacing(form):
    dtype, (mantissa, smallest, _), numpy_dtype = FORMATS[form]
    x = np.concatenate([np.linspace(-1, 1, 4001), np.geomspace(1e-9, 1, 4000)]).astype(np.float32)
    q, scale = scaled(x, dtype)
    found = np.asarray(q.astype(jnp.float32) / scale)
    normal_from = 2.0**smallest / float(scale)
    half = np.maximum(np.abs(x), normal_from) * 2.0 ** -(mantissa + 1)
    assert (np.abs(found - x) <= half).all()
    np.testing.assert_array_equal(found, (x * float(scale)).astype(numpy_dtype) / float(scale))


@pytest.mark.parametrize("form", FORMATS)
def test_the_scale_is_the_largest_power_of_two_that_fits(form):
    dtype = FORMATS[form][0]
    top = float(jnp.finfo(dtype).max)
    max_magnitude = np.geomspace(1e-20, 1e30, 999).astype(np.float32)
    scale = np.asarray(float8.power_of_two_scale(max_magnitude, dtype), np.float64)
    assert (np.frexp(scale)[0] == 0.5).all()
    assert (max_magnitude * scale <= top * (1 + 1e-6)).all() and (
        max_magnitude * scale * 2 > top
    ).all()
    edges = np.array([top, top * 4, np.nextafter(np.float32(top), np.float32(np.inf))], np.float32)
    np.testing.assert_array_equal(float8.power_of_two_scale(edges, dtype), [1, 0.25, 0.5])


def test_zeros_stay_zeros_and_have_a_scale():
    for dtype, _, _ in FORMATS.values():
        q, scale = scaled(jnp.zeros((4, 4)), dtype)
        assert np.isfinite(scale) and scale > 0
        np.testing.assert_array_equal(q.astype(jnp.float32), 0)


@pytest.mark.parametrize("form", FORMATS)
def test_rounding_does_not_depend_on_the_scale(form):
    """Hence a rank that scales by its own part of a tensor rounds as one that sees all of it."""
    dtype, (_, smallest, _), _ = FORMATS[form]
    x = normal(4096)
    x = jnp.where(jnp.abs(x) < 2.0**-7, 1.0, x)
    scale = float8.power_of_two_scale(float8.max_magnitude(x), dtype)
    # As far as the smallest number stays above the subnormal ones.
    room = int(np.log2(float(scale) * 2.0**-7)) - smallest
    wanted = float8.quantize(x, scale, dtype).astype(jnp.float32) / scale
    assert room >= 5
    for step in range(room + 1):
        q = float8.quantize(x, scale / 2**step, dtype)
        np.testing.assert_array_equal(q.astype(jnp.float32) / scale * 2**step, wanted)


# ------------------------------------------------------------------------------- products

TOKENS, IN, OUT = 256, 128, 192


def run(x, ws, dys, scaling: str, outer: int = -2):
    """Outputs, gradient of x and gradients of the weights."""

    def multiply(x, ws):
        scales = [float8.power_of_two_scale(float8.max_magnitude(w), float8.FORWARD) for w in ws]
        pairs = zip(ws, scales, strict=True)
        weights = [float8.quantize_weight(w, scale, scaling, outer) for w, scale in pairs]
        return float8.matmul(x, weights, "x")

    ys, vjp = jax.vjp(multiply, x, ws)
    return ys, *vjp(dys)


def example(rows_apart: float = 0.0):
    """x, two weights, and the gradients of two outputs; rows may differ in size."""
    apart = jnp.exp(rows_apart * normal(TOKENS, 1, seed=5))
    x = normal(TOKENS, IN) * apart
    ws = [normal(IN, OUT, seed=1, std=0.02), normal(IN, OUT // 2, seed=2, std=0.02)]
    dys = [normal(TOKENS, OUT, seed=3, std=1e-5), normal(TOKENS, OUT // 2, seed=4, std=1e-7)]
    return x, ws, [dy * apart for dy in dys]


@pytest.mark.parametrize(
    ("scaling", "outer"), [("tensor", -2), ("row", -1), slow("tensor", -1), slow("row", -2)]
)
def test_products_are_the_references(scaling, outer):
    x, ws, dys = example(rows_apart=2.0)
    ys, dx, dws = jax.jit(run, static_argnums=(3, 4))(x, ws, dys, scaling, outer)
    wanted = [reference.products(x, w, dy, scaling) for w, dy in zip(ws, dys, strict=True)]
    for y, dw, (y_, _, dw_) in zip(ys, dws, wanted, strict=True):
        assert relative_error(y, y_) < 1e-6
        assert relative_error(dw, dw_) < 1e-6
    assert relative_error(dx, sum(w[1] for w in wanted)) < 1e-6


def expected_errors(scaling: str) -> tuple[float, float, float]:
    """Of output, gradient of x and gradient of w: independent roundings of both operands."""
    forward, backward = RMS["e4m3"], RMS["e5m2"]
    mixed = np.hypot(forward, backward)
    return np.hypot(forward, forward), mixed, mixed if scaling == "tensor" else 0.0


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_errors_are_those_of_the_roundings(scaling):
    x, ws, dys = example()
    (y, _), dx, (dw, _) = run(x, ws, [dys[0], jnp.zeros_like(dys[1])], scaling)
    exact = x @ ws[0], dys[0] @ ws[0].T, x.T @ dys[0]
    expected = expected_errors(scaling)
    for found, wanted, error in zip((y, dx, dw), exact, expected, strict=True):
        assert relative_error(found, wanted) == pytest.approx(error, rel=0.1, abs=1e-6)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_no_element_is_further_off_than_its_terms_allow(scaling):
    """A term of e4m3 x e4m3 is off by at most (1 + 2^-4)^2 - 1, with a floor for tiny elements."""
    x, ws, dys = example()
    (y, _), _, _ = run(x, ws, dys, scaling)
    relative, floor = (1 + 2**-4) ** 2 - 1, 2.0**-18
    terms = jnp.abs(x) @ jnp.abs(ws[0])
    tiny = floor * IN * float8.max_magnitude(x) * float8.max_magnitude(ws[0])
    assert (jnp.abs(y - x @ ws[0]) <= relative * terms + 2 * tiny).all()


def test_a_scale_per_row_keeps_small_tokens():
    """Tokens 2^-20 of the largest vanish under one scale, and keep their precision under theirs."""
    x, ws, dys = example()
    x = x.at[: TOKENS // 2].mul(2.0**-20)
    small = slice(None, TOKENS // 2)
    exact = (x @ ws[0])[small]
    (by_row, _), _, _ = run(x, ws, dys, "row")
    (by_tensor, _), _, _ = run(x, ws, dys, "tensor")
    assert relative_error(by_row[small], exact) == pytest.approx(expected_errors("row")[0], rel=0.1)
    assert relative_error(by_tensor[small], exact) > 0.9


def test_leading_dims_are_tokens():
    x, ws, dys = example()
    ys, dx, dws = run(x, ws, dys, "tensor")
    apart = lambda a: a.reshape(4, -1, a.shape[-1])  # noqa: E731
    ys3, dx3, dws3 = run(apart(x), ws, [apart(dy) for dy in dys], "tensor")
    for a, b in zip([*ys3, dx3, *dws3], [*map(apart, ys), apart(dx), *dws], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(scaling, bad):
    """In x, a weight or a gradient: it is in all that it is multiplied into, never clipped."""
    x, ws, dys = example()
    clean = run(x, ws, dys, scaling)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(clean))
    ys, _, dws = run(x.at[3, 5].set(bad), ws, dys, scaling)
    assert np.isnan(ys[0][3]).all() and not np.isfinite(dws[0][5]).any()
    ys, dx, _ = run(x, [ws[0].at[5, 7].set(bad), ws[1]], dys, scaling)
    assert np.isnan(ys[0][:, 7]).all() and np.isnan(dx[:, 5]).all()
    _, dx, dws = run(x, ws, [dys[0].at[3, 7].set(bad), dys[1]], scaling)
    assert np.isnan(dx[3]).all()
    assert not np.isfinite(dws[0][:, 7]).any()


@pytest.mark.parametrize("names", [(), ("x",), (float8.SCALE,), ("x", float8.SCALE)])
def test_what_is_saved_comes_back_as_it_was(names):
    """Numbers above 240 too, which `jax.checkpoint` would round to infinity."""
    x, ws, dys = example()
    x = x.at[0, 0].set(7.0 * 0.99)  # 444 once scaled
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    checkpointed = jax.checkpoint(lambda x, ws: run(x, ws, dys, "tensor")[0], policy=policy)

    def through(f):
        return jax.jit(lambda x, ws: jax.vjp(f, x, ws)[1](dys))(x, ws)

    def plain(x, ws):
        return run(x, ws, dys, "tensor")[0]

    q, _ = scaled(x, float8.FORWARD)
    assert jnp.max(jnp.abs(q.astype(jnp.float32))) > 240
    for a, b in zip(*(jax.tree.leaves(through(f)) for f in (checkpointed, plain)), strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------ a norm's output, unwritten


def unwritten(x, gain, dtype=jnp.bfloat16):
    """x, and its norm as `rms_norm_beside` gives it."""
    return norm.rms_norm_beside(x.astype(dtype), gain, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_products_of_a_norm_are_those_of_the_array(scaling):
    """Outputs and gradients, bit for bit, with tokens in several dims."""
    x, ws, dys = example()
    gain = 1 + 0.1 * normal(IN, seed=7)
    apart = lambda a: a.reshape(4, -1, a.shape[-1])  # noqa: E731

    def layer(x, gain, ws, written):
        x, normed = unwritten(x, gain, jnp.float32)
        scales = [float8.power_of_two_scale(float8.max_magnitude(w), float8.FORWARD) for w in ws]
        pairs = zip(ws, scales, strict=True)
        weights = [float8.quantize_weight(w, scale, scaling) for w, scale in pairs]
        return x, float8.matmul(normed.written() if written else normed, weights, "x")

    def through(written):
        f = functools.partial(layer, written=written)
        results, vjp = jax.vjp(f, apart(x), gain, ws)
        return results, vjp((apart(normal(TOKENS, IN, seed=8)), [apart(dy) for dy in dys]))

    found, wanted = (jax.jit(functools.partial(through, written))() for written in (False, True))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_norm_is_not_computed_again_for_what_is_saved():
    """Of a layer with its input and the rounded norm saved: no pass over the input for the norm."""
    policy = jax.checkpoint_policies.save_only_these_names("x", float8.SCALE, norm.SCALE)
    x, ws, dys = example()

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, gain, w):
        x, normed = unwritten(x, gain)
        scale = float8.power_of_two_scale(float8.max_magnitude(w), float8.FORWARD)
        weight = float8.quantize_weight(w.astype(x.dtype), scale, "tensor")
        return float8.matmul(normed, [weight], "x")[0]

    backward = lambda x, gain, w, dy: jax.vjp(layer, x, gain, w)[1](dy)  # noqa: E731
    dy = dys[0].astype(jnp.bfloat16)
    jaxpr = jax.make_jaxpr(backward)(x, jnp.ones(IN), ws[0], dy).jaxpr
    (again,) = [e for e in jaxpr.eqns if e.primitive.name == "remat2"]
    assert "f8_e4m3fn[256,128]" not in str(again) and "rsqrt" not in str(again)
    assert "f8_e4m3fn[128,192]" in str(again)  # the weight, rounded again


def test_the_kernel_keeps_nothing_that_the_backward_does_not_read():
    """Saved of the input: its 8-bit copy alone, whoever made it."""
    policy = jax.checkpoint_policies.save_only_these_names("x", float8.SCALE)
    sizes = [(256, 128), (256, 128), (128, 384), (256, 384)]
    operands = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]

    def kept() -> tuple[list[str], bool]:
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(a, b, w):
            scale = float8.power_of_two_scale(float8.max_magnitude(w), float8.FORWARD)
            x = jax.ad_checkpoint.checkpoint_name(a * b, "x")
            return float8.matmul(x, [float8.quantize_weight(w, scale, "tensor")], "x")[0]

        backward = jax.jit(lambda a, b, w, dy: jax.vjp(layer, a, b, w)[1](dy))
        text = backward.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        (barrier,) = [line for line in text.splitlines() if "optimization_barrier" in line]
        return sorted(barrier.split(" : ")[1].split(", ")), "quantize_both_ways" in text

    by_xla, _ = kept()
    with for_h200():
        assert kept() == (by_xla, True)


# --------------------------------------------------------------------------- on GPUs: lowering

#: Tokens, in, out of Llama 3's projections: 8B, 70B and 405B at 16,384 or 8,192 tokens.
PRODUCTION = [
    (16384, 4096, 6144),
    (16384, 4096, 14336),
    (16384, 14336, 4096),
    (8192, 8192, 28672),
    (8192, 16384, 53248),
]


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("shape", PRODUCTION, ids=str)
def test_lowered_for_cuda_the_operands_have_8_bits(shape, scaling):
    tokens, D, F = shape
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    gradients = jax.jit(run, static_argnums=3)
    traced = gradients.trace(bf16((tokens, D)), [bf16((D, F))], [bf16((tokens, F))], scaling)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    dots = [line.split(" : ", 1)[1] for line in text.splitlines() if "dot_general" in line]
    pairs = sorted(line.count("f8E4M3FN") * 10 + line.count("f8E5M2") for line in dots)
    # Two e4m3; e4m3 and e5m2, twice, or bfloat16 for the weight's gradient.
    assert pairs == ([11, 11, 20] if scaling == "tensor" else [0, 11, 20])
    assert all(line.split("-> ")[1].strip().endswith("bf16>") for line in dots)
