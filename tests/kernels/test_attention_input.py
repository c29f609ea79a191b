"""What attention refuses: every error names the argument, its value and what is allowed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels.attention import AttentionMask, Choice, api, attention, choose
from jaxpar.kernels.attention.capability import (
    CAPABILITIES,
    DETERMINISM_FLAGS,
    make_request,
    refusal,
)
from jaxpar.kernels.platform import Platform

CPU = Platform("cpu", "cpu")
H200 = Platform("gpu", "NVIDIA H200", "9.0")
A100 = Platform("gpu", "NVIDIA A100-SXM4-80GB", "8.0")
V100 = Platform("gpu", "Tesla V100", "7.0")


def request(T=8, S=8, H=4, G=2, K=8, B=2, dtype=jnp.bfloat16, **mask):
    """q, k, v and a mask."""
    q, k = (jax.ShapeDtypeStruct((B, *shape, K), dtype) for shape in ((T, H), (S, G)))
    positions = lambda n: np.broadcast_to(np.arange(n, dtype=np.int32), (B, n))  # noqa: E731
    return q, k, k, AttentionMask(positions(T), positions(S), **mask)


def packed(**others):
    """A request with documents."""
    ones = np.ones((2, 8), np.int32)
    return request(q_segments=ones, kv_segments=ones, **others)


def changed(**values):
    """A good request with some of q, k, v or the mask's fields replaced."""
    good = dict(zip(("q", "k", "v", "mask"), packed(), strict=True))
    of_mask = {name: values.pop(name) for name in list(values) if name not in good}
    good["mask"] = dataclasses.replace(good["mask"], **of_mask)
    return tuple((good | values).values())


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


INT8, INT64 = (np.zeros((2, 8), dtype) for dtype in (np.int8, np.int64))

BAD = {
    "q of three dimensions": (changed(q=array(8, 4, 8)), r"q.shape = \(8, 4, 8\) .*\[B, T, H, K\]"),
    "k of three dimensions": (changed(k=array(8, 2, 8)), r"k.shape = \(8, 2, 8\) .*\[B, S, G, K\]"),
    "no queries": (request(T=0), r"q.shape = \(2, 0, 4, 8\) .*without dimensions of size 0"),
    "no keys": (request(S=0), r"k.shape = \(2, 0, 2, 8\) .*without dimensions of size 0"),
    "no rows": (request(B=0), r"q.shape = \(0, 8, 4, 8\) .*without dimensions of size 0"),
    "no KV heads": (request(G=0), r"k.shape = \(2, 8, 0, 8\) .*without dimensions of size 0"),
    "float64": (
        request(dtype=np.float64),
        "q.dtype = float64 must be one of bfloat16, float16, float32",
    ),
    "int32": (request(dtype=jnp.int32), "q.dtype = int32 must be one of bfloat16, float16"),
    "mixed k": (changed(k=array(2, 8, 2, 8, dtype=jnp.float16)), "k.dtype = float16 .*q, bfloat16"),
    "mixed v": (changed(v=array(2, 8, 2, 8, dtype=jnp.float32)), "v.dtype = float32 .*q, bfloat16"),
    "fewer values than keys": (
        changed(v=array(2, 4, 2, 8)),
        r"v.shape = \(2, 4, 2, 8\) .*shape of k",
    ),
    "values wider than keys": (
        changed(v=array(2, 8, 2, 16)),
        r"v.shape = \(2, 8, 2, 16\) .*shape of k, .* or with a smaller head dim",
    ),
    "another batch": (changed(q=array(1, 8, 4, 8)), r"k.shape = \(2, 8, 2, 8\) .*batch size, 1"),
    "another head dim": (changed(q=array(2, 8, 4, 4)), r"k.shape = .* must be .*head dim, 4"),
    "heads that do not group": (
        changed(q=array(2, 8, 3, 8)),
        r"q.shape = \(2, 8, 3, 8\) .*divisible by the 2 KV heads, not 3",
    ),
    "short positions": (
        changed(q_positions=np.zeros((2, 5), np.int32)),
        r"mask.q_positions.shape = \(2, 5\) must be \(2, 8\), batch and length of q",
    ),
    "short key positions": (
        changed(kv_positions=np.zeros((2, 5), np.int32)),
        r"mask.kv_positions.shape = \(2, 5\) must be \(2, 8\), batch and length of k",
    ),
    "segments to broadcast": (
        changed(kv_segments=np.ones((1, 8), np.int32)),
        r"mask.kv_segments.shape = \(1, 8\) must be \(2, 8\)",
    ),
    "one-sided segments": (changed(kv_segments=None), "segments = only q_segments must be both"),
    "long positions": (changed(q_positions=INT64), "mask.q_positions.dtype = int64 must be int32"),
    "short segments": (changed(q_segments=INT8), "mask.q_segments.dtype = int8 must be int32"),
    "no window": (request(window=0), "mask.window = 0 must be a whole number of at least 1"),
    "negative window": (request(window=-3), "mask.window = -3 must be a whole number of at least"),
    "half a window": (request(window=2.5), "mask.window = 2.5 must be a whole number of at least"),
    "no documents": (request(max_segments=0), "mask.max_segments = 0 must be a whole number"),
    "order of other lengths": (
        request(S=9, in_order=True),
        "mask.in_order = True for 8 queries and 9 keys must be False",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name):
    arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: attention(*arguments, backend="reference"))


def test_good_arguments_are_not():
    q, k, v, mask = packed(max_segments=1, in_order=True)
    run = lambda q, k, v: attention(q, k, v, mask, backend="reference")  # noqa: E731
    out, lse = jax.eval_shape(run, q, k, v)
    assert out.shape == q.shape and lse.shape == (2, 4, 8)


# ------------------------------------------------------------------- what each backend refuses

ORDERED, HOPPER = request(in_order=True), request(K=128)

#: Backend, request, platform, why.
REFUSALS = {
    "cudnn on a CPU": ("cudnn", ORDERED, CPU, "needs an NVIDIA GPU, and the platform is cpu"),
    "cudnn, float32": ("cudnn", request(in_order=True, dtype=jnp.float32), H200, "q is float32"),
    "cudnn, odd head dims": (
        "cudnn",
        request(in_order=True, K=12),
        H200,
        "multiples of 8 up to 256, and q has head dim 12",
    ),
    "cudnn, wide heads": ("cudnn", request(in_order=True, K=264), H200, "up to 256.* head dim 264"),
    "cudnn, other orders": ("cudnn", request(), H200, "only tokens in text order"),
    "cudnn, documents without a bound": (
        "cudnn",
        packed(in_order=True),
        H200,
        "mask.max_segments, which is not set",
    ),
    "cudnn, wide heads before Hopper": (
        "cudnn",
        request(in_order=True, K=136),
        A100,
        "head dims above 128 need compute capability 9.0, and NVIDIA A100-SXM4-80GB has 8.0",
    ),
    "cudnn, documents before Hopper": (
        "cudnn",
        packed(in_order=True, max_segments=2),
        A100,
        "packed documents need compute capability 9.0, and NVIDIA A100-SXM4-80GB has 8.0",
    ),
    "hopper on a CPU": ("pallas_hopper", HOPPER, CPU, "an NVIDIA GPU, and the platform is cpu"),
    "hopper on Ampere": (
        "pallas_hopper",
        HOPPER,
        A100,
        r"compute capability 9.0 \(Hopper\), and NVIDIA A100-SXM4-80GB has 8.0",
    ),
    "hopper, float32": ("pallas_hopper", request(K=64, dtype=jnp.float32), H200, "q is float32"),
    "hopper, head dim 72": (
        "pallas_hopper",
        request(K=72),
        H200,
        "head dims must be 64, 128 or 256, and q has head dim 72",
    ),
    "triton before Ampere": (
        "triton",
        HOPPER,
        V100,
        "capability 8.0 or later, and Tesla V100 has 7.0",
    ),
    "triton, float32": ("triton", request(K=64, dtype=jnp.float32), H200, "q is float32"),
    "triton, head dim 72": ("triton", request(K=72), A100, "multiples of 16 up to 256"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_backend_refuses_and_names_who_can(name):
    backend, (q, k, _, mask), platform, why = REFUSALS[name]
    with pytest.raises(ValueError, match=rf"'{backend}': .*{why}.*Backends that can: .*reference"):
        choose(backend, q, k, mask, platform=platform)
    chosen = choose("auto", q, k, mask, platform=platform)
    assert backend not in (chosen.forward, chosen.backward)


def test_what_attention_refuses_on_this_cpu():
    q, k, v, mask = request(K=64)
    for backend in ("cudnn", "pallas_hopper", "triton"):
        with pytest.raises(ValueError, match="the platform is cpu"):
            jax.eval_shape(lambda: attention(q, k, v, mask, backend=backend))  # noqa: B023


def test_hopper_takes_what_it_declares():
    for dim in (64, 128, 256):
        for dtype in (jnp.bfloat16, jnp.float16):
            q, k, _, mask = request(T=5, S=13, K=dim, dtype=dtype, window=3)
            choice = choose("pallas_hopper", q, k, mask, platform=H200, need_lse_gradient=True)
            assert choice.forward == choice.backward == "pallas_hopper"


def test_a_table_row_for_every_module():
    assert list(api.BACKENDS) == list(CAPABILITIES)


def test_an_unknown_backend_is_refused():
    q, k, v, mask = request()
    with pytest.raises(
        ValueError, match="'flash': must be one of auto, cudnn, pallas_hopper, triton, reference"
    ):
        jax.eval_shape(lambda: attention(q, k, v, mask, backend="flash"))


# -------------------------------------------------------- gradients of lse, and determinism


def test_a_gradient_of_lse_is_refused_by_a_backward_that_lacks_it(monkeypatch):
    """The backward decides, whoever runs the forward."""
    monkeypatch.setattr(api, "forward", lambda q, k, v, mask, choice: plain(q, k, v, mask))
    plain = api.reference.forward
    q, k, v, mask = (jnp.ones((1, 4, 2, 8)),) * 3 + (request(T=4, S=4, B=1)[3],)
    for backward, message in (
        ("cudnn", 'pass backend="pallas_hopper" or backend="triton" or backend="reference"'),
        ("reference", None),
    ):
        monkeypatch.setattr(api, "choose", lambda *_, b=backward, **__: Choice("cudnn", b))
        grad = jax.grad(lambda q: attention(q, k, v, mask)[1].sum())
        if message is None:
            assert jnp.isfinite(grad(q)).all()
            continue
        with pytest.raises(ValueError, match=rf"'cudnn' does not compute .*{message}"):
            grad(q)


def test_cudnn_before_hopper_serves_what_jax_lets_it():
    def chosen(arguments, platform):
        q, k, _, mask = arguments
        return choose("auto", q, k, mask, platform=platform).forward

    one, documents = {"in_order": True}, {"in_order": True, "max_segments": 2}
    assert chosen(request(K=128, **one), A100) == chosen(request(K=136, **one), H200) == "cudnn"
    assert chosen(packed(K=72, **documents), H200) == "cudnn"
    assert chosen(request(K=136, **one), A100) == chosen(packed(**documents), A100) == "reference"


def test_who_can_give_a_gradient_of_lse():
    q, k, _, mask = request(K=64, in_order=True)
    with pytest.raises(ValueError, match="'cudnn': it has no gradient of the log-sum-exp"):
        choose("cudnn", q, k, mask, platform=H200, need_lse_gradient=True)
    choice = choose("auto", q, k, mask, platform=A100, need_lse_gradient=True)
    assert (choice.forward, choice.backward) == ("cudnn", "triton")


@pytest.mark.parametrize(
    "flags",
    [
        "",
        *(f"{f}={v}" for f in DETERMINISM_FLAGS for v in ("true", "false")),
        DETERMINISM_FLAGS[0],
        "--a=b --xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false",
    ],
)
def test_cudnn_is_deterministic_by_xla_flag_only(flags, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    q, k, _, mask = request(K=64, in_order=True)
    ask = lambda direction: make_request(direction, q, k, mask, H200, deterministic=True)  # noqa: E731
    assert refusal("cudnn", ask("forward")) is None
    assert refusal("pallas_hopper", ask("backward")) is None
    assert refusal("reference", ask("backward")) is None
    why = refusal("cudnn", ask("backward"))
    if flags and not flags.endswith("false"):
        assert why is None
        return
    assert "--xla_gpu_deterministic_ops=true in XLA_FLAGS" in why
    with pytest.raises(ValueError, match="'cudnn': its backward is deterministic only with"):
        choose("cudnn", q, k, mask, platform=H200, deterministic=True)
    choice = choose("auto", q, k, mask, platform=H200, deterministic=True)
    assert choice.backward == "pallas_hopper" and choice.deterministic


@pytest.mark.parametrize("make", [request, packed])
def test_a_deterministic_backward_is_one_that_was_measured(make, monkeypatch):
    """cuDNN's, of which nothing was measured, asked for 139 GiB at 8 sequences of 4,096."""
    monkeypatch.setenv("XLA_FLAGS", f"{DETERMINISM_FLAGS[0]}=true")
    q, k, _, mask = make(K=64, in_order=True, max_segments=2)
    choice = choose("auto", q, k, mask, platform=H200, deterministic=True)
    assert choice.backward == "pallas_hopper" and choice.deterministic


def test_determinism_reaches_the_kernel(monkeypatch):
    asked = []

    def backward(*arrays, **options):
        asked.append(options)
        return arrays[:3]

    monkeypatch.setattr(api.BACKENDS["pallas_hopper"], "backward", backward)
    for deterministic in (False, True):
        choice = Choice("reference", "pallas_hopper", deterministic=deterministic)
        a = np.zeros((1, 1, 1, 1))
        api.backward(a, a, a, packed()[3], *[a] * 4, choice)
    assert asked == [{"deterministic": False}, {"deterministic": True}]
