"""The start-up test of the kernels of recurrences: right ones pass, and a wrong one is named."""

import functools

import jax.numpy as jnp
import pytest

from jaxpar.config import ConfigError, replace
from jaxpar.kernels.recurrence import Shape, api, reference
from jaxpar.kernels.recurrence.triton import api as triton
from jaxpar.training.selftests import recurrent as recurrent_selftest
from tests.meshes.test_recurrent_layers import DELTA_NET
from tests.slow import slow

KERNELS = replace(
    DELTA_NET,
    **{
        "compute.dtype": "bfloat16",
        "compute.recurrent_backend": "triton",
        "model.delta_layers.mixer.chunk": 16,
        "model.delta_layers.mixer.key_head_dim": 16,
        "model.delta_layers.mixer.value_head_dim": 16,
    },
)


class Backend:
    """The reference, with results changed by a function."""

    def __init__(self, change):
        self.change = change

    def delta_rule(self, *arguments):
        return self.change(*reference.delta_rule(*arguments))


@pytest.fixture
def use(monkeypatch):
    """Run something else in place of the kernels, as if on Hopper."""
    monkeypatch.setattr(recurrent_selftest.recurrence, "choose", lambda *_: "triton")
    monkeypatch.setattr(api, "choose", lambda backend, *_: backend)
    return lambda backend: monkeypatch.setitem(api.BACKENDS, "triton", backend)


def test_right_kernels_pass(use):
    use(Backend(lambda out, last: (out, last)))
    lines: list[str] = []
    recurrent_selftest.test_recurrences(KERNELS, lines.append)
    (line,) = lines
    assert line.startswith("kernels of Gated DeltaNet: triton; self-test, error: out ")
    assert all(name in line for name in recurrent_selftest.NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [True, False])
def test_the_kernels_pass(delta, use):
    interpreted = {
        rule: functools.partial(getattr(triton, rule), interpret=True)
        for rule in ("delta_rule", "state_space")
    }
    use(type("Interpreted", (), {name: staticmethod(f) for name, f in interpreted.items()}))
    errors = recurrent_selftest.errors_of(delta, Shape(32, 64, 64, "bfloat16"), "triton", 0)
    assert all(1e-5 < error < 1e-2 for error in errors.values()), errors


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda out, last: (out.at[:, 70].multiply(2), last), "out is off by "),
        slow(lambda out, last: (out, jnp.where(last == last[0, 0, 0, 0], jnp.nan, last)), "last"),
    ],
)
def test_wrong_kernels_are_refused(change, wrong, use):
    use(Backend(change))
    with pytest.raises(ConfigError, match=f"Gated DeltaNet disagree .*{wrong}.*reference"):
        recurrent_selftest.test_recurrences(KERNELS, print)


def test_it_says_why_not():
    lines: list[str] = []
    recurrent_selftest.test_recurrences(DELTA_NET, lines.append)
    (line,) = lines
    assert line.startswith("kernels of Gated DeltaNet: reference (not triton: it needs compute cap")
    recurrent_selftest.test_recurrences(
        replace(DELTA_NET, **{"compute.recurrent_backend": "reference"}), lines.append
    )
    assert lines[1:] == ["kernels of Gated DeltaNet: reference (as configured)"]


def test_kernels_by_name_on_a_cpu():
    with pytest.raises(ConfigError, match=r"backend = 'triton': .*Hopper.*recurrent-backend auto"):
        recurrent_selftest.backends_of(KERNELS)
