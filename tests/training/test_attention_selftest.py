"""The start-up test of attention kernels: right ones pass, and each way of being wrong is named."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels.attention import AttentionMask, Choice, api, reference
from jaxpar.training.selftests import attention as attention_selftest

KERNELS = Choice("cudnn", "pallas_hopper")


def inputs(dtype=jnp.bfloat16, T=256):
    """q, k, v, mask, d_out: two documents."""
    positions = np.concatenate([np.arange(T // 4), np.arange(T - T // 4)]).astype(np.int32)[None]
    segments = (1 + (np.arange(T) >= T // 4)).astype(np.int32)[None]
    mask = AttentionMask(positions, positions, segments, segments)
    q, k, v, d_out = map(jnp.asarray, attention_selftest.random_values(mask, 4, 16, dtype, seed=0))
    assert q.shape == d_out.shape == (1, T, 4, 16) and k.shape == v.shape == (1, T, 1, 16)
    return q, k, v, mask, d_out


@pytest.fixture
def planted(monkeypatch):
    """(forward, backward): changes to what the reference computes, as backends of KERNELS."""

    def plant(forward=lambda *found: found, backward=lambda *found: found):
        def changed_forward(*arguments, **options):
            return forward(*reference.forward(*arguments))

        def changed_backward(*arguments, deterministic=False, **options):
            return backward(*reference.backward(*arguments))

        module = types.SimpleNamespace(forward=changed_forward, backward=changed_backward)
        names = dict.fromkeys((KERNELS.forward, KERNELS.backward), module)
        monkeypatch.setattr(api, "BACKENDS", api.BACKENDS | names)

    return plant


def test_right_kernels_pass(planted):
    planted()
    for dtype, least in ((jnp.bfloat16, 1e-4), (jnp.float32, 0)):
        errors = attention_selftest.check(KERNELS, *inputs(dtype))
        assert list(errors) == ["out", "lse", "dq", "dk", "dv"]
        assert least <= errors["out"] < 1e-2


WRONG = {
    "out": (dict(forward=lambda out, lse: (out.at[:, -32:].multiply(0.9), lse)), "out is off by"),
    "lse": (dict(forward=lambda out, lse: (out, lse + 0.01)), "lse is off by 1.0e-02 .*1.0e-03"),
    "lse of one row": (
        dict(forward=lambda out, lse: (out, lse.at[0, 0, 5].set(reference.EMPTY_LSE))),
        r"lse is off by 1.0e\+30",
    ),
    "dq": (
        dict(backward=lambda dq, dk, dv: (1.05 * dq, dk, dv)),
        r"dq is off by 4.* \(at most 2.0e-02",
    ),
    "dk": (dict(backward=lambda dq, dk, dv: (dq, jnp.roll(dk, 1, 1), dv)), "dk is off by"),
    "dv": (dict(backward=lambda dq, dk, dv: (dq, dk, dv.at[:, -32:].set(0))), "dv is off by"),
    "a NaN": (
        dict(backward=lambda dq, dk, dv: (dq.at[0, 3, 1, 2].set(jnp.nan), dk, dv)),
        "dq is off by nan",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_named(name, planted):
    change, message = WRONG[name]
    planted(**change)
    with pytest.raises(attention_selftest.WrongKernel, match=message) as caught:
        attention_selftest.check(KERNELS, *inputs())
    assert str(caught.value).startswith(
        "forward cudnn, backward pallas_hopper disagree with reference in float32 on cpu: "
    )
    assert "\n" not in str(caught.value)


def test_a_query_that_sees_one_key_is_no_false_alarm(planted):
    """Its gradient is 0, and what bfloat16 makes of it is rounding."""
    noise = lambda x: x + jnp.asarray(1e-3 * np.random.default_rng(0).normal(size=x.shape), x.dtype)  # noqa: E731
    planted(backward=lambda dq, dk, dv: (noise(dq), noise(dk), dv))
    q, k, v, mask, d_out = inputs()
    errors = attention_selftest.check(KERNELS, q, k, v, mask.replace(window=1), d_out)
    assert errors["dq"] > 1e-3


@pytest.mark.parametrize("in_order", [True, False])
def test_slices(in_order):
    assert list(attention_selftest.slice_of(5, in_order)) == [0, 1, 2, 3, 4]
    places = attention_selftest.slice_of(10 * attention_selftest.SLICE, in_order)
    assert len(places) == attention_selftest.SLICE and places[0] == 0
    steps = np.diff(places)
    assert (steps == 1).all() if in_order else (steps != 1).sum() == 1
    assert in_order or places[-1] == 10 * attention_selftest.SLICE - 1
