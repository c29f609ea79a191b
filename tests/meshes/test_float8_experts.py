"""Experts in float8: the same on every mesh, and close to float32 (`test_float8.py`)."""

import functools

import jax
import pytest

from jaxpar.certification import distances, traces
from jaxpar.config import ClampedSwiglu, Experts, Glu
from tests.meshes.float8_traces import (
    ACROSS_MESHES,
    AGAINST_FLOAT32,
    assert_close,
    first_gradients,
    loss_curve,
    relative_errors,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_compile"),
]  # quicker: model/test_experts.py


def of(expert: Glu) -> dict[str, Experts]:
    """Experts in place of the dense feed-forwards."""
    experts = Experts(expert=expert, num_experts=4, experts_per_token=2, num_shared_experts=1)
    return {"model__layers__feed_forward": experts}


EXPERTS = of(Glu(32))

#: The same with biases and a clamp, as in gpt-oss.
BIASED = of(Glu(32, ClampedSwiglu(), bias=True))

EXPERT_MESHES = """
expert=2,gather_dtype=float8
data=2
data=2,expert=2,gather_dtype=float8,layer_loop=unroll
expert=2,expert_dispatch=rows,zero=1
expert=2,expert_slack=0.5
tensor=2,expert=2
data=2,sequence=2,gather_dtype=float8
pipeline=2,num_microbatches=2,expert=2,zero=1
data=2,zero=2,num_microbatches=2
""".split()

MIXED = "expert=2,tensor=2,gather_dtype=float8"


@functools.cache
def one_device_with_experts(dtype: str = "float8") -> traces.TrainingTrace:
    return first_gradients("data=1", jax.devices("cpu"), compute__matmul_dtype=dtype, **EXPERTS)


@pytest.mark.parametrize("mesh", EXPERT_MESHES)
def test_gradients_of_experts_are_those_of_one_device(mesh, devices):
    found, wanted = first_gradients(mesh, devices, **EXPERTS), one_device_with_experts()
    assert found.loss == pytest.approx(wanted.loss, rel=1e-4)
    error, name = distances.worst(relative_errors(found.gradients, wanted.gradients))
    assert error < ACROSS_MESHES, name


def test_gradients_of_experts_are_near_those_of_float32():
    """Rounding moves some tokens to other experts."""
    found, wanted = one_device_with_experts(), one_device_with_experts("compute")
    assert found.loss == pytest.approx(wanted.loss, rel=2e-3)
    errors = relative_errors(found.gradients, wanted.gradients)
    assert all(1e-3 < error < 2 * AGAINST_FLOAT32 for error in errors.values()), errors


@pytest.mark.parametrize("mesh", [MIXED, "tensor=2,expert=2", *EXPERT_MESHES[:3]])
def test_gradients_of_biased_experts_are_those_of_one_device(mesh, devices):
    found, wanted = (first_gradients(on, devices, **BIASED) for on in (mesh, "data=1"))
    assert found.loss == pytest.approx(wanted.loss, rel=1e-4)
    error, name = distances.worst(relative_errors(found.gradients, wanted.gradients))
    assert error < ACROSS_MESHES, name


def test_gradients_of_biased_experts_are_near_those_of_float32(devices):
    wanted = first_gradients("data=1", devices, **BIASED)
    plain = first_gradients("data=1", devices, compute__matmul_dtype="compute", **BIASED)
    errors = relative_errors(wanted.gradients, plain.gradients)
    assert all(error < 2 * AGAINST_FLOAT32 for error in errors.values()), errors


def test_the_loss_curve_of_experts_is_that_of_float32(devices):
    """A text that can be learned, 300 steps."""
    plain = loss_curve(devices, compute__matmul_dtype="compute", **EXPERTS)
    assert_close(loss_curve(devices, **EXPERTS), plain)
