"""Recurrences: the chunks of the reference, and the kernels in Pallas' interpreter on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels.platform import Platform
from jaxpar.kernels.recurrence import (
    Shape,
    choose,
    delta_rule,
    delta_rule_by_channel,
    reference,
    refusal,
)
from jaxpar.kernels.recurrence.chunks import Sums, sums_of, unit_lower_inverse
from jaxpar.kernels.recurrence.triton import api as triton
from tests.kernels.recurrences import Case, by_token, errors, inputs_of, run
from tests.slow import slow

HOPPER = Platform("gpu", "NVIDIA H100 80GB HBM3", "9.0")
QWEN3_NEXT = Shape(64, 128, 128, "bfloat16")

CASES = [
    Case(),
    slow(Case(C=32, T=70, B=2, H=4, G=2, K=16, V=16)),
    slow(Case(T=33, decay=30.0, V=64)),
    slow(Case(T=48, decay=1e-4, documents=0.0, K=128, V=16, H=1)),
    Case("state_space", V=16),
    slow(Case("state_space", C=32, T=50, B=2, H=6, G=2, K=32)),
    slow(Case("state_space", T=16, K=128, V=64, decay=30.0)),
]


def interpreted(case: Case):
    return functools.partial(getattr(triton, case.rule), interpret=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_the_reference(case):
    wanted = run(getattr(reference, case.rule), case)
    assert max(errors(run(interpreted(case), case), wanted).values()) <= 1e-6


@pytest.mark.parametrize("case", [Case(), slow(Case(T=70, C=32, decay=30.0))], ids=str)
def test_the_reference_equals_one_token_after_the_other(case):
    """From a state, with heads that share keys, and documents that begin anywhere."""
    assert max(errors(run(reference.delta_rule, case), run(by_token, case)).values()) <= 2e-6


#: Tiles alone, halves of halves, a chunk that is no power of two, and decays of up to exp(-100) and
#: more a token, where the exponential of a sum would overflow or vanish.
BY_CHANNEL = [
    slow(Case("by_channel", G=2, C=32, T=70)),
    slow(Case("by_channel", G=2, C=5, T=33)),
    slow(Case("by_channel", G=2, C=48, T=100, B=2, V=8)),
    Case("by_channel", G=2, C=64, T=70, decay=50.0, documents=0.02),
    slow(Case("by_channel", G=2, C=64, T=200, decay=1e-4, documents=0.0)),
    slow(Case("by_channel", G=2, C=256, T=300)),
]


@pytest.mark.slow  # quicker: model/test_recurrent.py
@pytest.mark.parametrize("case", BY_CHANNEL, ids=str)
def test_decays_of_channels_equal_one_token_after_the_other(case):
    found, wanted = run(delta_rule_by_channel, case), run(by_token, case)
    assert all(np.isfinite(a).all() for a in found)
    assert max(errors(found, wanted).values()) <= 1e-5


@pytest.mark.slow  # quicker: one token after the other, above
def test_equal_decays_of_channels_are_those_of_the_head():
    case = Case("by_channel", G=2, C=32)
    (q, k, v, log_decay, *rest, state), _ = inputs_of(case)
    of_head = log_decay[..., 0]
    alike = jnp.broadcast_to(of_head[..., None], log_decay.shape)
    found = delta_rule_by_channel(q, k, v, alike, *rest, state, case.C)
    wanted = reference.delta_rule(q, k, v, of_head, *rest, state, case.C)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * float(jnp.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decays_of_channels_in_16_bits(dtype):
    case = Case("by_channel", G=2, T=150, C=32, K=32, decay=0.1, dtype=dtype)
    exact = run(delta_rule_by_channel, case, "float32")
    assert max(errors(run(delta_rule_by_channel, case), exact).values()) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["delta_rule", "state_space"])
def test_in_bfloat16(rule):
    """Operands are rounded, and sums are not: the errors are those of rounding a few times."""
    case = Case(rule, T=150, C=32, K=32, decay=0.1, dtype="bfloat16")
    exact = run(getattr(reference, rule), case, "float32")
    assert max(errors(run(getattr(reference, rule), case), exact).values()) < 1e-2
    assert max(errors(run(interpreted(case), case), exact).values()) < 1e-2


@pytest.mark.slow
def test_large_states_in_float16():
    """1,000 times float16's range, in results and in gradients."""
    case = Case(H=1, decay=1e-3, documents=0.0, dtype="float16")
    (q, k, v, *rest, state), (d_out, d_last) = inputs_of(case)
    function = functools.partial(reference.delta_rule, size=case.C)
    large = lambda a: 1e8 * a  # noqa: E731
    (out, last), pull = jax.vjp(function, q, k, v, *rest, large(state))
    gradients = pull((large(d_out), large(d_last)))
    found = [out, last, gradients[-1]]
    assert all(np.isfinite(a).all() and np.abs(a).max() > 1e7 for a in map(np.asarray, found))


def test_sums_of_decays_keep_their_digits():
    """Between two tokens after ones that decay fast, as in a sum of these two alone."""
    rng = np.random.default_rng(0)
    log_decay = -np.exp(rng.uniform(-12, 6, 64)).astype(np.float32)
    sums = sums_of(jnp.asarray(log_decay), axis=0)
    exact = np.cumsum(np.maximum(log_decay, -128.0).astype(np.float64))
    pairs = np.asarray(Sums(*(a[:, None] - a[None] for a in sums)).total)
    wanted = exact[:, None] - exact[None]
    assert np.all(np.abs(pairs - wanted) <= 1e-6 * np.maximum(np.abs(wanted), 0.1))


@pytest.mark.parametrize("C", [1, 5, 64])
def test_unit_lower_inverse(C):
    """Also of keys that are alike, where a series of powers of the matrix has terms up to 1e18."""
    below = np.tril(np.random.default_rng(0).uniform(0.5, 1.0, (2, C, C)), -1)
    weights = np.cos(np.arange(2.0 * C * C)).reshape(2, C, C)
    found, pull = jax.vjp(unit_lower_inverse, jnp.asarray(below, jnp.float32))
    exact = np.linalg.inv(np.eye(C) + below)
    np.testing.assert_allclose(found, exact, atol=1e-5)
    transposed = np.swapaxes(exact, -1, -2)
    d_below = -np.tril(transposed @ weights @ transposed, -1)
    np.testing.assert_allclose(pull(jnp.asarray(weights, jnp.float32))[0], d_below, atol=3e-5)


@pytest.mark.slow
def test_the_kernels_inverse_of_keys_that_are_alike():
    """As above, where every key of a document is the same and nothing decays."""
    case = Case(T=32, C=32, H=1, decay=1e-6, documents=0.0)
    (q, k, *rest), _ = inputs_of(case)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    found = triton.delta_rule(q, k, *rest, case.C, interpret=True)
    for ours, exact in zip(found, by_token(q, k, *rest, case.C), strict=True):
        np.testing.assert_allclose(ours, exact, atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "platform", "why"),
    [
        (QWEN3_NEXT, HOPPER, None),
        (Shape(64, 128, 64, "bfloat16"), HOPPER, None),
        (QWEN3_NEXT, Platform("cpu"), "it needs compute capability 9.0 (Hopper) or later"),
        (QWEN3_NEXT, Platform("gpu", "NVIDIA L4", "8.9"), "it needs compute capability 9.0"),
        (Shape(64, 128, 128, "float32"), HOPPER, "it supports bfloat16, not float32"),
        (Shape(48, 128, 128, "bfloat16"), HOPPER, "chunks must have a size of 32 or 64, not 48"),
        (Shape(64, 96, 128, "bfloat16"), HOPPER, "keys must have a size of 64 or 128, not 96"),
        (Shape(64, 128, 96, "bfloat16"), HOPPER, "values must be a multiple of 64 wide, not 96"),
    ],
)
def test_refusals(shape, platform, why):
    found = refusal(shape, platform)
    assert found is None if why is None else found is not None and why in found


def test_choices():
    """Without a measurement, the kernels are used only by name."""
    unmeasured = Platform("gpu", "NVIDIA GH200 480GB", "9.0")
    assert choose("auto", QWEN3_NEXT, unmeasured) == "reference"
    assert choose("triton", QWEN3_NEXT, unmeasured) == "triton"
    assert choose("auto", QWEN3_NEXT, HOPPER) == "triton"
    assert choose("auto", QWEN3_NEXT, Platform("gpu", "NVIDIA H200", "9.0")) == "triton"
    assert choose("triton", QWEN3_NEXT, HOPPER) == "triton"
    assert choose("reference", QWEN3_NEXT, HOPPER) == "reference"
    with pytest.raises(ValueError, match="must be one of auto, reference, triton"):
        choose("cudnn", QWEN3_NEXT, HOPPER)
    (*arrays,), _ = inputs_of(Case())
    with pytest.raises(ValueError, match=r"not platform cpu\. Backends that can: reference"):
        delta_rule(*arrays, 16, backend="triton")


def test_auto_where_the_kernels_were_measured(monkeypatch):
    measured = "jaxpar.kernels.recurrence.capability.MEASURED_FASTER"
    monkeypatch.setattr(measured, (HOPPER.kind,))
    assert choose("auto", QWEN3_NEXT, HOPPER) == "triton"
    assert choose("auto", Shape(64, 128, 128, "float32"), HOPPER) == "reference"
