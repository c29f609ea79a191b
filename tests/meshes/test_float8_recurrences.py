"""Recurrent layers in float8: the same on every mesh, and close to float32 (`test_float8.py`)."""

import functools

import jax
import pytest

from jaxpar.certification import distances, traces
from jaxpar.config import (
    ConfigError,
    GatedDeltaNet,
    Glu,
    KimiDeltaAttention,
    Layer,
    Mamba2,
    replace,
)
from jaxpar.config.validate import check
from tests.meshes.float8_traces import (
    ACROSS_MESHES,
    AGAINST_FLOAT32,
    BASE,
    LAYER,
    first_gradients,
    relative_errors,
)

pytestmark = pytest.mark.usefixtures("quick_compile")

#: The norm after a recurrence divides by the length of what it returned, often near 0 in so small a
#: model. With an eps of 1e-2, it moves numbers across the boundary between two 8-bit numbers.
_ALIKE = {"norm_eps": 0.1, "chunk": 12}
_DELTA = {"key_head_dim": 4, "value_head_dim": 8, **_ALIKE}

#: By name. The numbers of heads are such that matrices have sides of multiples of 16.
MIXERS = {
    "delta_net": GatedDeltaNet(num_key_heads=16, num_value_heads=16, **_DELTA),
    "kimi_delta": KimiDeltaAttention(num_heads=8, **_DELTA),
    "mamba": Mamba2(num_heads=32, num_groups=2, head_dim=4, state_size=8, **_ALIKE),
}
KINDS = {
    name: {"model__norm__eps": 0.1, "model__layers": [Layer("recurrent", mixer, Glu(96)), LAYER]}
    for name, mixer in MIXERS.items()
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


@pytest.mark.slow  # quicker: test_float8.py; the sides of matrices, below
@pytest.mark.parametrize(("kind", "mesh"), [(kind, mesh) for kind in KINDS for mesh in MESHES])
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
        ("delta_net", {"num_key_heads": 4, "num_value_heads": 4}, "key_heads = 4: makes 104 of"),
        ("kimi_delta", {"num_heads": 1}, "num_heads = 1: makes 8 of .*num-heads 2"),
        ("mamba", {"num_heads": 6}, "num_heads = 6: makes 24 of mamba_out"),
    ],
)
def test_sides_of_matrices_are_multiples_of_16(kind, changed, message):
    fields = {name.replace("__", "."): value for name, value in KINDS[kind].items()}
    changed = {f"model.recurrent.mixer.{name}": value for name, value in changed.items()}
    check(replace(BASE, **fields))
    with pytest.raises(ConfigError, match=message):
        check(replace(BASE, **fields | changed))
