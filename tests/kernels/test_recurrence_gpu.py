"""The kernels of recurrences on a GPU, against the reference in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels import recurrence
from jaxpar.kernels.recurrence import Shape, refusal
from jaxpar.training.selftests.recurrent import errors_of
from tests.kernels.recurrences import Case, errors, inputs_of, run

pytestmark = pytest.mark.gpu

#: Widths of keys and values, and tokens of a chunk.
SHAPES = [(128, 128, 64), (128, 64, 64), (64, 64, 64), (64, 192, 64), (128, 256, 64), (64, 64, 32)]


@pytest.fixture(autouse=True)
def on_hopper():
    if why := refusal(Shape(64, 128, 128, "bfloat16")):
        pytest.skip(why)


def by(case: Case, backend: str):
    return functools.partial(getattr(recurrence, case.rule), backend=backend)


@pytest.mark.parametrize("rule", ["delta_rule", "state_space"])
@pytest.mark.parametrize(("K", "V", "C"), SHAPES)
def test_errors_are_those_of_bfloat16(rule, K, V, C):
    found = errors_of(rule == "delta_rule", Shape(C, K, V, "bfloat16"), "triton", 0)
    assert max(found.values()) < 1e-2, found


@pytest.mark.parametrize(
    "case",
    [
        Case(T=1000, B=2, G=2, H=4, K=128, V=128, C=64, decay=0.01, dtype="bfloat16"),
        Case(T=8192, G=1, H=2, K=128, V=128, C=64, decay=0.01, dtype="bfloat16", documents=1e-3),
        Case(T=65, G=1, H=1, K=64, V=64, C=64, decay=30.0, dtype="bfloat16"),
        Case("state_space", T=2000, G=2, H=32, K=128, V=64, C=64, decay=0.01, dtype="bfloat16"),
    ],
    ids=str,
)
def test_against_the_reference(case):
    """Rows, groups of heads, documents, and chunks that are not full."""
    with jax.default_matmul_precision("highest"):
        exact = run(by(case, "reference"), case, "float32")
    assert max(errors(run(by(case, "triton"), case), exact).values()) < 2e-2


def test_keys_that_are_alike():
    """The triangular inverse of a chunk without decay has numbers that cancel."""
    case = Case(T=256, H=2, K=128, V=128, C=64, decay=1e-6, documents=0.0, dtype="bfloat16")
    (q, k, *rest), _ = inputs_of(case)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    out, last = by(case, "triton")(q, k, *rest, case.C)
    wide = [a.astype("float32") for a in (q, k, rest[0])]
    with jax.default_matmul_precision("highest"):
        exact = by(case, "reference")(*wide, *rest[1:], case.C)
    for ours, wanted in zip((out, last), exact, strict=True):
        assert np.linalg.norm(ours - wanted) < 2e-2 * np.linalg.norm(wanted)


def test_the_same_bits_each_time():
    """No sum depends on the order in which programs run."""
    case = Case(T=4096, G=2, H=8, K=128, V=128, C=64, decay=0.01, dtype="bfloat16")
    first, second = (run(by(case, "triton"), case) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
