"""cuDNN and our own kernels on a GPU, against the reference in float32: python -m pytest -m gpu."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels.attention import attention, choose
from jaxpar.kernels.attention.hopper import api as pallas_hopper
from jaxpar.kernels.attention.hopper.blocks import backward_candidates, forward_candidates
from jaxpar.kernels.attention.triton import api as triton
from jaxpar.kernels.attention.triton.blocks import TritonBackward, TritonForward
from jaxpar.kernels.platform import Platform
from scripts.measure import attention_table
from scripts.measure.attention_shapes import draw, exact, one_group, parse_shapes
from tests.kernels.cases import (
    NAMES,
    Case,
    check,
    errors,
    inputs_of,
    largest_of,
    reference_of,
)

pytestmark = pytest.mark.gpu

#: What cuDNN can serve.
IN_ORDER = [
    Case(B=2, T=512, H=8, G=2),
    Case(B=2, T=512, H=8, G=2, K=128, window=100),
    Case(B=2, T=512, H=8, G=2, documents=5),
    Case(B=3, T=640, H=8, G=8, K=128, documents=17),
    Case(B=1, T=512, H=4, G=2, K=128, documents=5, window=64),
    Case(B=1, T=1024, H=4, G=1, K=256),
    Case(B=2, T=512, H=8, G=2, K=128, dtype="float16"),
    Case(B=2, T=512, H=4, G=4, K=128, I=64, documents=5),
]

#: Head dims of latent attention, in DeepSeek's models.
LATENT = [
    Case(B=2, T=512, H=4, G=4, K=192, I=128),
    Case(B=2, T=512, H=4, G=4, K=192, I=128, documents=5),
    Case(B=1, T=1024, H=2, G=2, K=192, I=128, window=200, dtype="float16"),
]

#: What only our own kernels can, the log-sum-exp's gradient apart.
OWN = [
    Case(T=1),
    Case(T=1, K=128),
    Case(T=1, K=256),
    Case(B=3, T=77, H=3),
    Case(B=2, T=777, H=6, G=2, K=128),
    Case(T=129, K=256, documents=3),
    Case(T=1000, H=4, documents=9, dtype="float16"),
    Case(T=640, K=256, documents=5, window=90, dtype="float16"),
    Case("permuted", T=1, S=130),
    Case("permuted", T=130, S=1, K=128),
    Case("permuted", B=2, T=600, S=900, H=6, G=3, documents=7),
    Case("permuted", B=2, T=900, S=600, H=4, G=2, K=128, documents=7, window=60),
    Case("permuted", T=500, S=700, K=256, window=200, dtype="float16"),
    Case("zigzag", B=2, T=512, S=2048, H=4, G=1),
    Case("zigzag", B=2, T=512, S=2048, H=4, G=1, K=128, documents=12),
    Case("zigzag", T=512, S=2048, K=256),
    Case("late", T=700, S=300, K=64),
    Case("late", T=700, S=300, K=128, documents=3),
    Case("late", T=700, S=300, K=256),
]

DETERMINISTIC = [
    Case(T=777, H=4, G=2, K=128),
    Case("permuted", B=2, T=600, S=900, H=6, G=3, documents=7),
    Case("zigzag", B=2, T=512, S=2048, H=4, G=1, K=128, documents=12),
]

#: Head dims that only Triton's kernels serve, in parts or alone.
PARTS = [
    Case(T=300, H=4, G=2, K=96),
    Case(T=200, K=80, documents=3, dtype="float16"),
    Case("permuted", T=200, S=300, H=3, K=112, documents=5, window=60),
    Case(T=260, K=192, window=90),
    Case("late", T=200, S=150, K=16),
]

AUTO = [
    Case(B=2, T=512, H=8, G=2, documents=5),
    Case("zigzag", B=2, T=512, S=2048, H=4, G=1, K=128, documents=12),
    Case("zigzag", T=512, S=2048, K=256),
]


@pytest.fixture
def ampere():
    """Triton's kernels are for all GPUs since this one."""
    platform = Platform.here()
    if float(platform.compute_capability) < 8.0:
        pytest.skip(f"{platform.kind} is older than Ampere")


@pytest.fixture
def hopper():
    """Our own kernels are for one kind of GPU."""
    platform = Platform.here()
    if platform.compute_capability != "9.0":
        pytest.skip(f"{platform.kind} is no Hopper GPU")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(backend: str, deterministic: bool, q, k, v, mask, d_out, d_lse):
    def attend(q, k, v):
        out, lse = attention(q, k, v, mask, backend=backend, deterministic=deterministic)
        return out, (jax.lax.stop_gradient(lse) if backend in ("cudnn", "auto") else lse)

    found, vjp = jax.vjp(attend, q, k, v)
    return *found, *vjp((d_out, d_lse))


def run(backend: str, x, deterministic: bool = False) -> list[np.ndarray]:
    """NAMES. cuDNN has no gradient of the log-sum-exp, so neither may "auto"."""
    arrays = x.q, x.k, x.v, x.mask, x.d_out, x.d_lse
    return [np.asarray(y) for y in _run(backend, deterministic, *arrays)]


def without_lse_gradient(x):
    return x.replace(d_lse=jnp.zeros_like(x.d_lse))


def assert_same_bits(found, wanted, what: str):
    for name, a, b in zip(NAMES, found, wanted, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=f"{name}, {what}")


@pytest.mark.parametrize("case", [*IN_ORDER, *LATENT], ids=str)
def test_cudnn_agrees_with_the_reference(case):
    x = without_lse_gradient(inputs_of(case))
    check(run("cudnn", x), reference_of(x), case.dtype)


@pytest.mark.parametrize("case", [*IN_ORDER, *OWN], ids=str)
def test_hopper_agrees_with_the_reference(case, hopper):
    """With a gradient of the log-sum-exp."""
    x = inputs_of(case)
    check(run("pallas_hopper", x), reference_of(x), case.dtype)


@pytest.mark.parametrize("case", [*IN_ORDER, *OWN, *PARTS, *LATENT], ids=str)
def test_triton_agrees_with_the_reference(case, ampere):
    """With a gradient of the log-sum-exp."""
    x = inputs_of(case)
    check(run("triton", x), reference_of(x), case.dtype)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("K", [64, 128, 256])
def test_triton_with_and_without_overlap(K, overlap, ampere):
    x = inputs_of(Case(B=2, T=640, H=4, G=2, K=K, documents=7))
    blocks = TritonForward(64, 32, 4, 2, overlap, heads=1)
    of_backward = TritonBackward(32, 64, 4, 2, 64, 32, 4, 2, overlap, 1, 1)
    out, lse = triton.forward(x.q, x.k, x.v, x.mask, blocks=blocks)
    rest = x.mask, out, lse, x.d_out, x.d_lse
    grads = triton.backward(x.q, x.k, x.v, *rest, blocks=of_backward)
    check([out, lse, *grads], reference_of(x), "bfloat16")


@pytest.mark.parametrize("shape", parse_shapes(["causal,packed"]), ids=str)
def test_triton_at_the_shapes_of_the_benchmarks(shape, ampere):
    """One KV head against float32; every head and row is computed alike."""
    asked = draw(shape, "bfloat16")
    wanted = exact(one_group(asked, None, None)[0])
    assert not attention_table.refusal("triton", asked, deterministic=False)
    backward = attention_table.TuningCandidate("backward", "triton")
    attention_table.attempt(backward, asked, None, wanted)  # raises if a result is wrong


@pytest.mark.parametrize("case", [*IN_ORDER, *OWN[-9:], *PARTS], ids=str)
def test_largest_products(case, ampere):
    x = inputs_of(case)
    found = triton.largest(x.q, x.k, x.mask)
    np.testing.assert_allclose(found, largest_of(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_triton_gives_the_same_bits(case, ampere):
    x = inputs_of(case)
    assert_same_bits(run("triton", x), run("triton", x), "again")


@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_deterministic_hopper_agrees_with_the_reference(case, hopper):
    x = inputs_of(case)
    check(run("pallas_hopper", x, deterministic=True), reference_of(x), case.dtype)


@pytest.mark.parametrize("case", IN_ORDER, ids=str)
def test_hopper_is_no_less_exact_than_cudnn(case, hopper):
    """Twice cuDNN's error would be another rounding."""
    x = without_lse_gradient(inputs_of(case))
    wanted = reference_of(x)
    ours, theirs = (errors(run(backend, x), wanted) for backend in ("pallas_hopper", "cudnn"))
    worse = {name: (ours[name], theirs[name]) for name in NAMES if ours[name] > 2 * theirs[name]}
    worse.pop("lse", None)  # float32 in both, and to the last bits it may be either
    assert not worse


BLOCKS = [
    (K, direction, blocks)
    for K in (64, 128, 256)
    for direction, candidates in (
        ("forward", forward_candidates),
        ("backward", backward_candidates),
    )
    for blocks in candidates(K)[1:]  # the first is the default
]


@pytest.mark.parametrize(("K", "direction", "blocks"), BLOCKS, ids=str)
def test_blocks_that_the_tuner_tries(K, direction, blocks, hopper):
    x = inputs_of(Case(B=2, T=640, H=4, G=2, K=K, documents=7))
    options = {"forward": {}, "backward": {}} | {direction: {"blocks": blocks}}
    forward = jax.jit(functools.partial(pallas_hopper.forward, **options["forward"]))
    backward = jax.jit(functools.partial(pallas_hopper.backward, **options["backward"]))
    out, lse = forward(x.q, x.k, x.v, x.mask)
    grads = backward(x.q, x.k, x.v, x.mask, out, lse, x.d_out, x.d_lse)
    check([out, lse, *grads], reference_of(x), "bfloat16")


@pytest.mark.parametrize("case", AUTO, ids=str)
def test_auto(case, hopper):
    """The best that can, forward and backward, under jit."""
    x = without_lse_gradient(inputs_of(case))
    choice = choose("auto", x.q, x.k, x.mask)
    assert "reference" not in (choice.forward, choice.backward)
    check(run("auto", x), reference_of(x), case.dtype)


@pytest.mark.parametrize("K", [64, 128, 256])
def test_the_gradient_of_the_log_sum_exp_alone(K, hopper):
    x = inputs_of(Case("permuted", B=2, T=300, S=400, H=4, G=2, K=K))
    x = x.replace(d_out=jnp.zeros_like(x.d_out))

    def total(q, k, v):
        _, lse = attention(q, k, v, x.mask, backend="pallas_hopper")
        return (lse * x.d_lse).sum()

    dq, dk, dv = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(x.q, x.k, x.v)
    assert not np.any(dv)
    out, lse, *wanted = reference_of(x)
    check([out.astype(x.q.dtype), lse, dq, dk, dv], [out, lse, *wanted], "bfloat16")


def test_cudnn_refuses_the_gradient_of_the_log_sum_exp():
    x = inputs_of(Case(T=128))
    with pytest.raises(ValueError, match="does not compute the gradient of the log-sum-exp"):
        jax.grad(lambda q: attention(q, x.k, x.v, x.mask, backend="cudnn")[1].sum())(x.q)


# --------------------------------------------------------------- what no comparison can show


def changed_in(x, document: int):
    """`x` with other and larger values in one document, and which queries and keys are its own."""
    mine = [np.asarray(ids == document) for ids in (x.mask.q_segments, x.mask.kv_segments)]
    change = lambda y, own: jnp.where(own[..., None, None], -7 * y[:, ::-1], y)  # noqa: E731
    queries, keys = mine
    values = dict(q=change(x.q, queries), d_out=change(x.d_out, queries))
    return x.replace(**values, k=change(x.k, keys), v=change(x.v, keys)), queries, keys


@pytest.mark.parametrize("K", [64, 96, 128, 256])
@pytest.mark.parametrize("order", ["text", "permuted"])
def test_documents_do_not_see_each_other_in_triton(order, K, ampere):
    x = inputs_of(Case(order, B=2, T=600, H=4, G=2, K=K, documents=6))
    changed, queries, keys = changed_in(x, document=2)
    for name, a, b in zip(NAMES, run("triton", x), run("triton", changed), strict=True):
        a, b = (y.swapaxes(1, 2) if name == "lse" else y for y in (a, b))  # [B, T, ...]
        own = keys if name in ("dk", "dv") else queries
        assert np.any(a[own] != b[own])
        np.testing.assert_array_equal(a[~own], b[~own], err_msg=name)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("K", [64, 128, 256])
@pytest.mark.parametrize("order", ["text", "permuted"])
def test_documents_do_not_see_each_other(order, K, deterministic, hopper):
    """All values of one are changed: of the others, not a bit of anything is."""
    x = inputs_of(Case(order, B=2, T=600, H=4, G=2, K=K, documents=6))
    changed, queries, keys = changed_in(x, document=2)
    assert queries.any(1).all() and keys.any(1).all()
    before, after = (run("pallas_hopper", y, deterministic) for y in (x, changed))
    for name, a, b in zip(NAMES, before, after, strict=True):
        a, b = (y.swapaxes(1, 2) if name == "lse" else y for y in (a, b))  # [B, T, ...]
        own = keys if name in ("dk", "dv") else queries
        assert np.any(a[own] != b[own])
        if name == "dq" and not deterministic and K < 256:  # additions in any order: the last bit
            np.testing.assert_allclose(
                *(np.float32(y[~own]) for y in (a, b)), rtol=2**-7, atol=1e-5
            )
        else:
            np.testing.assert_array_equal(a[~own], b[~own], err_msg=name)


def test_no_gradient_of_cudnn_leaks_between_documents():
    x = without_lse_gradient(inputs_of(Case(T=512, H=4, G=4, documents=4)))
    first = np.asarray(x.mask.q_segments[0] == 1)
    x = x.replace(d_out=jnp.where(first[None, :, None, None], jnp.ones_like(x.q), 0))
    for grad in run("cudnn", x)[2:]:
        assert np.all(grad[0, ~first] == 0)
        assert np.any(grad[0, first] != 0)


@pytest.mark.parametrize(
    "case", [Case(), Case(documents=20), Case("permuted", window=900)], ids=str
)
@pytest.mark.parametrize("K", [64, 128, 256])
def test_the_deterministic_backward_gives_the_same_bits(case, K, hopper):
    """Where the default one adds the parts of dq from 32 tiles of keys in any order."""
    x = inputs_of(Case(**(vars(case) | dict(B=2, T=4096, H=8, G=2, K=K))))
    first = run("pallas_hopper", x, deterministic=True)
    for _ in range(5):
        assert_same_bits(run("pallas_hopper", x, deterministic=True), first, "again")
    off = errors(run("pallas_hopper", x), first)
    assert max(off.values()) < 1e-2, "both are right"


@pytest.mark.parametrize("K", [64, 128, 256])
def test_the_forward_gives_the_same_bits(K, hopper):
    x = inputs_of(Case(B=2, T=2048, H=8, G=2, K=K, documents=20))
    first = run("pallas_hopper", x)
    for _ in range(5):
        again = run("pallas_hopper", x)
        for i, name in enumerate(NAMES):
            if name != "dq":
                np.testing.assert_array_equal(again[i], first[i], err_msg=name)
