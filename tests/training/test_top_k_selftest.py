"""The self-test of top-k's kernel: what it says, and that a wrong kernel ends the run."""

import pytest

from jaxpar.config import Config, ConfigError, replace
from jaxpar.kernels.platform import Platform, compiling_for
from jaxpar.kernels.take_largest import by_kernel
from jaxpar.parallel.replicas import top_k
from jaxpar.training.selftests import top_k as selftest
from tests.kernels.test_triton_lowering import GPU

CFG = replace(Config(), **{"parallel.replica_reduction": "top_k", "parallel.replica_top_k": 0.04})


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What is logged, with small groups and few of them."""
    monkeypatch.setattr(top_k, "MIN_GROUP", 256)
    monkeypatch.setattr(selftest, "EACH", 2)
    return []


def interpreted(parts, columns, k):
    return by_kernel(parts, columns, k, interpret=True)


def test_a_kernel_that_is_right(said):
    with compiling_for(Platform("gpu", GPU["9.0"], "9.0")):
        selftest.test_top_k(CFG, said.append, interpreted)
    (line,) = said
    assert line.startswith("elements of top_k: by a kernel; self-test: those of a sort, ")


def misplaced(parts, columns, k):
    """Takes another element of the last group in place of one."""
    values, places, rest = interpreted(parts, columns, k)
    return values, places.at[-1, 0].set(255), rest


def rounded(parts, columns, k):
    values, places, rest = interpreted(parts, columns, k)
    return values, places, rest * (1 + 2**-23)


def short(parts, columns, k):
    """Takes an element too few, as if the threshold were too high."""
    values, places, rest = interpreted(parts, columns, k)
    return values.at[0, 0].set(0), places, rest


@pytest.mark.parametrize(
    ("kernel", "what"), [(misplaced, "values, places"), (rounded, "rest"), (short, "values")]
)
def test_a_kernel_that_is_wrong_ends_the_run(kernel, what, said):
    with (
        compiling_for(Platform("gpu", GPU["9.0"], "9.0")),
        pytest.raises(ConfigError) as error,
    ):
        selftest.test_top_k(CFG, said.append, kernel)
    assert str(error.value) == (
        "parallel.replica_reduction = 'top_k': its kernel disagrees with a sort on cpu: "
        f"{what} differ. Fix: use --parallel.replica-reduction int8, and report the bug."
    )
    assert said == []


def test_without_a_gpu(said):
    selftest.test_top_k(CFG, said.append)
    why = "it needs an NVIDIA GPU since Ampere"
    assert said == [f"elements of top_k: by XLA (not the kernel: {why})"]


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [0.01, 0.001])
def test_on_a_gpu(ratio):
    """Groups and elements of them as in a run."""
    groups = top_k.groups_of(2**31, ratio)
    assert selftest.differing(groups, 0, by_kernel) == []
