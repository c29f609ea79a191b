"""Recurrent layers in float8: the same on every mesh, and close to float32 (`test_float8.py`)."""

import functools

import jax
import pytest

from jaxpar.config import ConfigError, replace
from jaxpar.config.validate import check
from jaxpar.verification import distances, traces
from tests.meshes.float8_traces import (
    ACROSS_MESHES,
    AGAINST_FLOAT32,
    BASE,
    first_gradients,
    relative_errors,
)
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("quick_compile")

_DELTA = dict(
    model__linear_num_key_heads=16,
    model__linear_num_value_heads=16,
    model__linear_key_head_dim=4,
    model__linear_value_head_dim=8,
)
#: The norm after a recurrence divides by the length of what it returned, often near 0 in so small a
#: model. With an eps of 1e-2, it moves numbers across the boundary between two 8-bit numbers.
_ALIKE = dict(model__norm_eps=0.1, model__recurrent_chunk=12)

#: By name. The numbers of heads are such that matrices have sides of multiples of 16.
KINDS = {
    "delta_net": dict(model__layer_pattern="G*", **_DELTA, **_ALIKE),
    "kimi_delta": dict(
        model__layer_pattern="K*",
        **_DELTA | {"model__linear_num_key_heads": 8, "model__linear_num_value_heads": 8},
        **_ALIKE,
    ),
    "mamba": dict(
        model__layer_pattern="M*",
        model__mamba_num_heads=32,
        model__mamba_num_groups=2,
        model__mamba_head_dim=4,
        model__mamba_state_size=8,
        **_ALIKE,
    ),
}

MESHES = """
tensor=2
sequence=2,gather_dtype=float8
data=2,gather_dtype=float8,layer_loop=unroll
data=2,zero=1,layer_loop=unroll,num_microbatches=2
""".split()


@functools.cache
def one_device(kind: str, scaling: str = "tensor", dtype: str = "float8") -> traces.TrainingTrace:
    fields = dict(compute__float8_scaling=scaling, compute__matmul_dtype=dtype)
    return first_gradients("data=1", jax.devices("cpu"), **fields, **KINDS[kind])


QUICK = [("kimi_delta", "tensor=2")]


@pytest.mark.parametrize(
    ("kind", "mesh"), slow_but(QUICK, [(kind, mesh) for kind in KINDS for mesh in MESHES])
)
def test_gradients_are_those_of_one_device(kind, mesh, devices):
    found, wanted = first_gradients(mesh, devices, **KINDS[kind]), one_device(kind)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-4)
    error, name = distances.worst(relative_errors(found.gradients, wanted.gradients))
    assert error < ACROSS_MESHES, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_gradients_are_near_those_of_float32(kind, scaling):
    """Lengths of queries, keys and heads are divided out: small ones have large relative errors."""
    found, wanted = one_device(kind, scaling), one_device(kind, dtype="compute")
    assert found.loss == pytest.approx(wanted.loss, rel=2e-3)
    errors = relative_errors(found.gradients, wanted.gradients)
    assert all(1e-3 < error < 2 * AGAINST_FLOAT32 for error in errors.values()), errors


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("delta_net", {"linear_num_key_heads": 4}, "key_heads = 4: must be divisible by .*8"),
        ("kimi_delta", {"linear_num_key_heads": 1}, "key_heads = 1: must be divisible by .*2"),
        ("mamba", {"mamba_num_heads": 6}, "mamba_num_groups = 2: must be divisible by .*16"),
    ],
)
def test_sides_of_matrices_are_multiples_of_16(kind, changed, message):
    fields = {name.replace("__", "."): value for name, value in KINDS[kind].items()}
    changed = {f"model.{name}": value for name, value in changed.items()}
    if kind != "mamba":
        changed["model.linear_num_value_heads"] = changed["model.linear_num_key_heads"]
    check(replace(BASE, **fields))
    with pytest.raises(ConfigError, match=message):
        check(replace(BASE, **fields | changed))
