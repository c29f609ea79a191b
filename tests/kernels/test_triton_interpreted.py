"""The Triton attention kernels on a CPU, in Pallas' interpreter, against the reference in float32.

Tiles are small, so that short sequences have masked, whole and skipped ones.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels.attention import tiles
from jaxpar.kernels.attention.reference import EMPTY_LSE
from jaxpar.kernels.attention.triton import api as triton
from jaxpar.kernels.attention.triton.blocks import TritonBackward, TritonForward
from jaxpar.kernels.attention.triton.shape import TritonShape
from tests.kernels.cases import Case, check, inputs_of, largest_of, reference_of
from tests.slow import slow

FORWARD = TritonForward(q=32, kv=16, overlap=True)
BACKWARD = TritonBackward(q=16, kv=32, dq_q=32, dq_kv=16, last_first=True)

CASES = [
    Case(T=100, H=4, G=2, K=48, documents=3, dtype="float32"),
    slow(Case(T=70, H=2, G=1, dtype="float16")),
    slow(Case(B=2, T=64, H=3, G=3, K=128)),
    slow(Case(T=90, H=4, G=1, K=96, window=20)),
    slow(Case(T=90, K=80, documents=4, window=30)),
    slow(Case("permuted", T=70, S=90, K=112, H=4, G=2, documents=3, window=40, dtype="float32")),
    slow(Case("permuted", T=1, S=50)),
    slow(Case("permuted", T=50, S=1)),
    slow(Case("zigzag", T=64, S=128, K=64, dtype="float16")),
    slow(Case("zigzag", T=64, S=256, K=256, H=1, documents=5)),
    slow(Case("late", T=80, S=50)),
    slow(Case(T=1, H=1, K=16)),
]

OTHER_BLOCKS = [
    (TritonForward(q=16, kv=64, overlap=False), TritonBackward(32, 16, dq_q=16, dq_kv=32)),
    (TritonForward(q=64, kv=16), TritonBackward(64, 16, dq_q=16, dq_kv=64)),
]


def run(case: Case, forward=FORWARD, backward=BACKWARD) -> list[jax.Array]:
    """NAMES, after a comparison with the reference."""
    x = inputs_of(case)
    out, lse = triton.forward(x.q, x.k, x.v, x.mask, blocks=forward, interpret=True)
    rest = x.mask, out, lse, x.d_out, x.d_lse
    grads = triton.backward(x.q, x.k, x.v, *rest, blocks=backward, interpret=True)
    found = [out, lse, *grads]
    check(found, reference_of(x), case.dtype)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_reference(case):
    run(case)


LARGEST = [
    Case(T=100, H=4, G=2, K=48, documents=3),
    Case("late", T=60, S=40, H=1, K=16),
    slow(Case(T=90, H=4, G=1, K=96, window=20)),
    slow(Case("permuted", T=70, S=90, K=112, H=4, G=2, documents=3, window=40)),
    slow(Case("zigzag", T=64, S=128, K=64)),
]


@pytest.mark.parametrize("case", LARGEST, ids=str)
def test_largest_products(case):
    x = inputs_of(dataclasses.replace(case, dtype="float32"))
    found = triton.largest(x.q, x.k, x.mask, blocks=FORWARD, interpret=True)
    np.testing.assert_allclose(found, largest_of(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_one_kv_head_at_a_time(monkeypatch):
    """On a GPU with few multiprocessors, programs of one KV head come before the next one's."""
    monkeypatch.setattr(tiles, "MULTIPROCESSORS", 1)
    forward = dataclasses.replace(FORWARD, heads=1)
    backward = dataclasses.replace(BACKWARD, heads=1, dq_heads=1)
    run(Case(B=2, T=80, H=4, G=2, K=16, dtype="float32"), forward, backward)


def test_queries_that_see_no_key():
    """They give 0 and an empty log-sum-exp, and get no gradient."""
    out, lse, dq, _, _ = run(Case("late", T=60, S=40, H=1, K=16))
    unseeing = slice(0, 30)
    assert (np.asarray(lse)[:, :, unseeing] == EMPTY_LSE).all()
    assert not np.any(out[:, unseeing]) and not np.any(dq[:, unseeing])


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(T=100), Case("permuted", T=70, S=90, documents=4)], ids=str)
@pytest.mark.parametrize(("forward", "backward"), OTHER_BLOCKS, ids=["plain", "overlap"])
def test_other_blocks(case, forward, backward):
    run(dataclasses.replace(case, H=2, G=1, dtype="float32"), forward, backward)


@pytest.mark.parametrize("K", range(16, 257, 16))
def test_parts_of_a_head_dim(K):
    """Powers of two of at least 16 that make up the head dim."""
    names = [field.name for field in dataclasses.fields(TritonShape)]
    s = TritonShape(**dict.fromkeys(names, None) | {"K": K})
    assert [at for at, _ in s.parts] == list(np.cumsum([0, *(n for _, n in s.parts)])[:-1])
    assert sum(n for _, n in s.parts) == K
    assert all(n >= 16 and n & (n - 1) == 0 for _, n in s.parts)


@pytest.mark.slow
def test_keys_of_two_shards_add_up():
    """As ring attention uses them: the gradients with the log-sum-exp of all keys."""
    x = inputs_of(Case("permuted", T=40, S=64, H=2, K=32, dtype="float32"))
    out, lse, *wanted = reference_of(x)
    parts = []
    for keys in (slice(0, 32), slice(32, 64)):
        mask = dataclasses.replace(x.mask, kv_positions=x.mask.kv_positions[:, keys])
        of_keys = x.q, x.k[:, keys], x.v[:, keys], mask, out, lse, x.d_out, x.d_lse
        parts.append(triton.backward(*of_keys, blocks=BACKWARD, interpret=True))
    (dq, *first), (more, *second) = parts
    halves = [jnp.concatenate(pair, axis=1) for pair in zip(first, second, strict=True)]
    check([out, lse, dq + more, *halves], [out, lse, *wanted], "float32")
