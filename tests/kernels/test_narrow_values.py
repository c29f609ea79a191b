"""Values whose head dim is smaller than that of keys: padded for kernels that have one head dim."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxpar.kernels.attention import Choice, api, attention, reference
from jaxpar.kernels.attention.capability import CAPABILITIES, takes_narrow_values
from jaxpar.kernels.platform import Platform
from tests.kernels.cases import Case, check, inputs_of, reference_of

CASE = Case(T=24, H=4, G=2, K=12, I=8, documents=3, dtype="float32")


def run(backend: str, x) -> list[jax.Array]:
    """What `cases.NAMES` name."""
    choice = Choice(backend, backend)
    out, lse = api.forward(x.q, x.k, x.v, x.mask, choice)
    return [out, lse, *api.backward(x.q, x.k, x.v, x.mask, out, lse, x.d_out, x.d_lse, choice)]


def of_one_head_dim(computed):
    """A backend as the kernels are: it has one head dim."""

    def forward(q, k, v, mask):
        assert q.shape[-1] == v.shape[-1]
        computed.append("forward")
        return reference.forward(q, k, v, mask)

    def backward(q, k, v, mask, out, lse, d_out, d_lse):
        assert q.shape[-1] == v.shape[-1] == out.shape[-1] == d_out.shape[-1]
        computed.append("backward")
        return reference.backward(q, k, v, mask, out, lse, d_out, d_lse)

    return SimpleNamespace(forward=forward, backward=backward)


@pytest.mark.parametrize("padded", [False, True])
def test_forward_and_backward(padded, monkeypatch):
    """The reference takes such values; padded, they give the same."""
    x, computed = inputs_of(CASE), []
    if padded:
        monkeypatch.setitem(api.BACKENDS, "triton", of_one_head_dim(computed))
    found = run("triton" if padded else "reference", x)
    assert computed == ["forward", "backward"] * padded
    assert found[0].shape == (1, 24, 4, 8) and found[4].shape == x.v.shape
    check(found, reference_of(x), "float32")


def test_the_reference_is_what_autodiff_gives():
    x = inputs_of(CASE)
    whole = np.concatenate((x.v, np.zeros((1, 24, 2, 4), np.float32)), axis=-1)
    attend = lambda q, k, v: attention(q, k, v, x.mask, backend="reference")[0]  # noqa: E731
    out, back = jax.vjp(lambda v: attend(x.q, x.k, v)[..., :8], whole)
    np.testing.assert_allclose(attend(x.q, x.k, x.v), out, atol=1e-6)
    (wanted,) = back(x.d_out)
    (found,) = jax.vjp(lambda v: attend(x.q, x.k, v), x.v)[1](x.d_out)
    np.testing.assert_allclose(found, wanted[..., :8], atol=1e-5)


def test_which_backends_take_them():
    h200, a100 = Platform("gpu", "H200", "9.0"), Platform("gpu", "A100", "8.0")
    cpu = Platform("cpu", "cpu")
    taking = lambda on, packed: {  # noqa: E731
        name for name in CAPABILITIES if takes_narrow_values(name, on, packed)
    }
    assert taking(h200, False) == {"cudnn", "reference"}
    assert taking(h200, True) == {"reference"}  # offsets of documents are q's, also of the output
    assert all(taking(on, packed) == {"reference"} for on in (a100, cpu) for packed in (0, 1))
