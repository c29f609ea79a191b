"""The start-up test of the kernels of experts: right ones pass, and a wrong one is named."""

import re

import jax.numpy as jnp
import pytest

from jaxpar.config import (
    Attention,
    ClampedSwiglu,
    Config,
    ConfigError,
    Experts,
    Glu,
    Layer,
    Mlp,
    Model,
    replace,
)
from jaxpar.config.validate import resolve
from jaxpar.execution.decisions import execution_of
from jaxpar.kernels.grouped_matmul import api, reference
from jaxpar.training.selftests import experts as experts_selftest
from tests.slow import slow

FEED_FORWARD = Experts(expert=Glu(16), num_experts=4, experts_per_token=2)
LAYER = Layer("layers", Attention(num_heads=2, num_kv_heads=2, head_dim=16), FEED_FORWARD)
EXPERTS = {"model": Model(d_model=32, vocab_size=512, layers=[LAYER] * 4)}
EXPERT = "model.layers.feed_forward.expert"


def execution(**changes):
    return execution_of(resolve(replace(Config(), **EXPERTS | changes), 1))


@pytest.fixture
def run_as_if_on_hopper(monkeypatch):
    """Choose the kernels; they are the reference, since `api` still refuses."""
    monkeypatch.setattr(experts_selftest.kernels, "refusal", lambda *_: None)


@pytest.mark.parametrize("expert_dim", [0, slow(1)])
def test_right_kernels_pass(expert_dim):
    errors = experts_selftest.errors_of(execution().cfg, expert_dim)
    assert errors.keys() == set(experts_selftest.NAMES)
    assert all(1e-4 < error < 1e-2 for name, error in errors.items()), errors
    exact = experts_selftest.errors_of(execution(**{"compute.dtype": "float32"}).cfg, 0)
    assert max(exact.values()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("expert_dim", [0, 1])
def test_right_kernels_in_float8_pass(expert_dim):
    cfg = execution(**{"compute.matmul_dtype": "float8"}).cfg
    errors = experts_selftest.errors_of(cfg, expert_dim)
    assert all(error < 1e-2 for error in errors.values()), errors


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "dtype"), [(0.3, "compute"), (7.0, "compute"), (7.0, "float8")])
def test_kernels_with_biases_and_clamps_pass(limit, dtype):
    clamped = Glu(16, ClampedSwiglu(limit=limit), bias=True)
    gpt_oss = {EXPERT: clamped, "compute.matmul_dtype": dtype}
    errors = experts_selftest.errors_of(execution(**gpt_oss).cfg, 1)
    assert errors.keys() == {*experts_selftest.NAMES, *experts_selftest.OF_BIASES}
    least = 1e-4 if dtype == "compute" else 0
    assert all(least <= error < 1e-2 for error in errors.values()), errors


@pytest.mark.slow
def test_kernels_without_a_gate_pass():
    plain = {EXPERT: Mlp(16, "relu_squared")}
    for expert_dim in (0, 1):
        errors = experts_selftest.errors_of(execution(**plain).cfg, expert_dim)
        assert errors.keys() == set(experts_selftest.WITHOUT_GATE)
        assert all(1e-4 < error < 1e-2 for error in errors.values()), errors


def test_it_says_what_runs(run_as_if_on_hopper):
    said = []
    experts_selftest.test_experts(execution(), said.append)
    assert said[0].startswith("expert kernels: hopper; self-test, error: out ")
    experts_selftest.test_experts(execution_of(resolve(Config(), 1)), said.append)
    assert len(said) == 1, "a dense model has nothing to test"


def test_it_says_that_float8_runs_the_reference(run_as_if_on_hopper):
    said = []
    experts_selftest.test_experts(execution(**{"compute.matmul_dtype": "float8"}), said.append)
    assert re.search("float8: reference .not hopper: widths must be multiples of 128", said[1])


def test_without_hopper_it_says_why():
    said = []
    experts_selftest.test_experts(execution(), said.append)
    assert "reference (not hopper: it needs compute capability 9.0" in said[0]


def test_a_wrong_kernel_is_named(run_as_if_on_hopper, monkeypatch):
    plain = reference.grouped_outer

    def wrong(x, *rest, dtype, **how):
        factor = 1 if x.dtype == jnp.float32 else 1.1
        return (factor * plain(x, *rest, dtype=jnp.float32, **how)).astype(dtype)

    monkeypatch.setattr(api.reference, "grouped_outer", wrong)
    with pytest.raises(ConfigError, match=r"d_gate is off by 1\.0e-01, d_up .* d_down") as error:
        experts_selftest.test_experts(execution(), print)
    assert "out is off" not in str(error.value)


@pytest.mark.slow
def test_a_wrong_kernel_in_float8_is_named(run_as_if_on_hopper, monkeypatch):
    plain = reference.grouped_outer
    right = lambda x: x.dtype == jnp.float32  # noqa: E731

    def wrong(x, *rest, dtype, **how):
        return ((1 if right(x) else 1.3) * plain(x, *rest, dtype=jnp.float32, **how)).astype(dtype)

    monkeypatch.setattr(api.reference, "grouped_outer", wrong)
    named = r"d_gate is off by .* beyond the reference in float8, d_up .* d_down"
    with pytest.raises(ConfigError, match=named) as error:
        experts_selftest.test_experts(execution(**{"compute.matmul_dtype": "float8"}), print)
    assert "out is off" not in str(error.value)
