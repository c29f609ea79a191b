"""Which kernels are chosen: by measurement, forward and backward apart, or by the heuristic."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxpar.config import Attention, Config, Glu, Layer, replace, validate
from jaxpar.kernels import attention
from jaxpar.kernels.attention import AttentionMask, choice, choose, explain
from jaxpar.kernels.attention import choice as measurements
from jaxpar.kernels.attention.capability import CAPABILITIES, kind_of
from jaxpar.kernels.attention.hopper.blocks import (
    BackwardBlocks,
    ForwardBlocks,
    default_backward,
    default_forward,
)
from jaxpar.kernels.attention.triton.blocks import TritonBackward, TritonForward
from jaxpar.kernels.platform import Platform

CPU = Platform("cpu", "cpu")
H200 = Platform("gpu", "NVIDIA H200", "9.0")
A100 = Platform("gpu", "NVIDIA A100-SXM4-80GB", "8.0")

#: A real table for these would make the tests depend on it.
TESTED = Platform("gpu", "NVIDIA Tested", "9.0")


def request(T=4096, S=None, B=4, H=32, G=8, K=128, dtype=jnp.bfloat16, **mask):
    """q, k and a mask in text order, without values."""
    S = T if S is None else S
    q, k = (jax.ShapeDtypeStruct((B, *shape, K), dtype) for shape in ((T, H), (S, G)))
    rows = lambda length: jax.ShapeDtypeStruct((B, length), jnp.int32)  # noqa: E731
    return q, k, AttentionMask(rows(T), rows(S), **{"in_order": T == S} | mask)


def row(direction, backend, ms, kind="causal", **values):
    """A measurement at the shape of `request()`."""
    sizes = {"q": 64, "kv": 64, "stages": 2, "heads": 0} if backend == "pallas_hopper" else None
    return {
        "direction": direction,
        "backend": backend,
        "kind": kind,
        **{"B": 4, "T": 4096, "S": 4096, "H": 32, "G": 8, "D": 128},
        "dtype": "bfloat16",
        "blocks": sizes,
        "ms": ms,
        "tflops": 500.0,
    } | values


def table(*rows, **conditions) -> str:
    """A file's text."""
    about = {"gpu": TESTED.kind, "jax": "0.11.2", "cudnn": 92000, "commit": "0", "command": "x"}
    return json.dumps(about | conditions | {"rows": list(rows)})


@pytest.fixture
def measured(monkeypatch):
    """(rows) -> from now on these are the measurements on TESTED."""

    def use(*rows):
        parsed = measurements.parse(table(*rows), "tested.json", TESTED.kind)
        monkeypatch.setattr(choice, "measurements", {TESTED.kind: parsed}.__getitem__)

    use()
    return use


# ------------------------------------------------------------------------------ by measurement


def test_forward_and_backward_are_chosen_apart(measured):
    measured(
        row("forward", "cudnn", 2.0),
        row("forward", "pallas_hopper", 1.5, blocks={"q": 128, "kv": 64, "stages": 4, "heads": 0}),
        row("forward", "pallas_hopper", 1.8, blocks={"q": 128, "kv": 128, "stages": 2, "heads": 0}),
        row("backward", "cudnn", 3.0),
        row("backward", "pallas_hopper", 4.0),
    )
    chosen = choose("auto", *request(), platform=TESTED)
    assert (chosen.forward, chosen.backward) == ("pallas_hopper", "cudnn")
    assert chosen.forward_blocks == ForwardBlocks(q=128, kv=64, stages=4)
    assert chosen.backward_blocks is None
    told = explain("auto", *request(), platform=TESTED)
    assert told == (
        "forward pallas_hopper, backward cudnn "
        "(measured on NVIDIA Tested at B 4, T 4096, S 4096, H 32, G 8)"
    )
    assert "\n" not in told and hash(chosen) == hash(dataclasses.replace(chosen))


def test_the_nearest_shape_decides(measured):
    """First by T x S in powers of two, then by group, then by rows of heads."""

    def both(cudnn, hopper, **shape):
        names = {"cudnn": cudnn, "pallas_hopper": hopper}
        return [
            row(way, name, ms, **shape)
            for name, ms in names.items()
            for way in ("forward", "backward")
        ]

    measured(
        *both(1, 2, T=1024, S=1024),
        *both(2, 1, T=8192, S=8192),
        *both(1, 2, T=8192, S=8192, G=32),
        *both(1, 2, T=8192, S=8192, B=1),
    )
    forward = lambda **shape: choose("auto", *request(**shape), platform=TESTED).forward  # noqa: E731
    assert forward(T=512) == "cudnn"
    assert forward(T=2048) == "cudnn"
    assert forward(T=4096) == "pallas_hopper"
    assert forward(T=65536) == "pallas_hopper"
    assert forward(T=65536, G=32) == "cudnn"
    assert forward(T=65536, B=1) == "cudnn"
    assert forward(T=65536, B=64) == "pallas_hopper"


def test_a_backend_does_not_win_where_its_rival_was_not_measured(measured):
    measured(row("forward", "pallas_hopper", 1.0), row("forward", "cudnn", 2.0, T=512, S=512))
    chosen = choose("auto", *request(), platform=TESTED)
    assert chosen.forward == "cudnn"
    assert "no measurement on NVIDIA Tested for causal masks of head dim 128" in chosen.reason


@pytest.mark.parametrize(
    "other", [{"kind": "packed"}, {"D": 64}, {"direction": "backward"}], ids=str
)
def test_only_like_is_compared_with_like(measured, other):
    rivals = row("forward", "cudnn", 2.0), row("forward", "pallas_hopper", 1.0)
    measured(*rivals)
    assert choose("auto", *request(), platform=TESTED).forward == "pallas_hopper"
    measured(*(rival | other for rival in rivals))
    assert choose("auto", *request(), platform=TESTED).forward == "cudnn"


def test_a_deterministic_backward_has_measurements_of_its_own(measured, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    measured(
        row("backward", "cudnn", 1.0),
        row("backward", "pallas_hopper", 2.0),
        row("backward", "cudnn", 4.0, deterministic=True),
        row("backward", "pallas_hopper", 3.0, deterministic=True),
    )
    pick = lambda same: choose("auto", *request(), platform=TESTED, deterministic=same)  # noqa: E731
    assert pick(False).backward == "cudnn"
    assert pick(True).backward == "pallas_hopper"


def test_a_deterministic_backward_serves_who_did_not_ask_if_it_is_faster(measured):
    others = [row("backward", "cudnn", 3.0), row("backward", "pallas_hopper", 2.0)]
    for ms, expected in ((1.0, True), (2.5, False)):
        measured(*others, row("backward", "pallas_hopper", ms, deterministic=True))
        assert choose("auto", *request(), platform=TESTED).deterministic is expected


def test_a_named_backend_takes_its_measured_blocks(measured):
    sizes = {"q": 64, "kv": 256, "stages": 1, "heads": 0}
    measured(row("backward", "cudnn", 1.0), row("backward", "pallas_hopper", 2.0, blocks=sizes))
    chosen = choose("pallas_hopper", *request(), platform=TESTED)
    assert chosen.forward == chosen.backward == "pallas_hopper"
    assert chosen.backward_blocks == BackwardBlocks(**sizes)
    assert chosen.forward_blocks == default_forward(128)
    assert str(chosen) == (
        "pallas_hopper (forward: as configured; no measurement on NVIDIA Tested for causal masks "
        "of head dim 128; backward: as configured; measured on NVIDIA Tested at B 4, T 4096, "
        "S 4096, H 32, G 8)"
    )


def test_general_masks_have_one_kernel(measured):
    general = request(T=1024, S=4096)
    hopper = row("forward", "pallas_hopper", 1.0, kind="general", S=1024)
    measured(hopper, row("backward", "pallas_hopper", 1.0, kind="general"))
    chosen = choose("auto", *general, platform=TESTED)
    assert chosen.forward == chosen.backward == "pallas_hopper"
    assert "not cudnn: it supports only tokens in text order" in chosen.reason


# ------------------------------------------------------------------------------- by heuristic


def test_without_measurements(measured):
    measured()
    chosen = choose("auto", *request(), platform=TESTED)
    assert (chosen.forward, chosen.backward) == ("cudnn", "cudnn")
    assert chosen.forward_blocks is None
    assert chosen.reason == "no measurement on NVIDIA Tested for causal masks of head dim 128"
    chosen = choose("auto", *request(in_order=False), platform=TESTED)
    assert (chosen.forward, chosen.backward) == ("pallas_hopper", "pallas_hopper")
    assert chosen.forward_blocks == default_forward(128)
    assert chosen.backward_blocks == default_backward(128)


def test_a_gpu_without_a_table():
    assert measurements.measurements(A100.kind) == ()
    told = explain("auto", *request(), platform=A100)
    assert told.startswith("cudnn (not pallas_hopper: it needs an NVIDIA GPU of compute capability")
    assert told.endswith(
        "no measurement on NVIDIA A100-SXM4-80GB for causal masks of head dim 128)"
    )


def test_reference_where_nothing_else_can():
    told = explain("auto", *request(), platform=CPU, deterministic=True)
    assert told == "reference (the others need an NVIDIA GPU, and the platform is cpu)"
    assert explain("reference", *request(), platform=H200) == "reference (as configured)"
    assert choose("auto", *request(dtype=jnp.float32), platform=H200).forward == "reference"


def test_reference_is_not_taken_where_another_can(measured):
    """However fast it was measured."""
    measured(row("forward", "reference", 0.1), row("backward", "reference", 0.1))
    chosen = choose("auto", *request(), platform=TESTED)
    assert "reference" not in (chosen.forward, chosen.backward)


SEGMENTS = jax.ShapeDtypeStruct((4, 4096), jnp.int32)
PACKED = dict(q_segments=SEGMENTS, kv_segments=SEGMENTS, max_segments=16)


@pytest.mark.parametrize(
    ("gpu", "capability", "asked"),
    [
        ("NVIDIA A100-SXM4-80GB", "8.0", request(**PACKED)),
        ("NVIDIA A100-SXM4-80GB", "8.0", request(in_order=False)),
        ("NVIDIA A100-SXM4-80GB", "8.0", request(K=256)),
        ("NVIDIA L4", "8.9", request(window=512, **PACKED)),
        ("NVIDIA GeForce RTX 4090", "8.9", request(S=8192, in_order=False)),
        ("NVIDIA H200", "9.0", request(K=96, in_order=False)),
        ("NVIDIA B200", "10.0", request(in_order=False)),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", request(in_order=False)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_gpu_since_ampere_falls_to_reference(gpu, capability, asked):
    chosen = choose("auto", *asked, platform=Platform("gpu", gpu, capability))
    assert (chosen.forward, chosen.backward) == ("triton", "triton")
    assert "not cudnn: " in chosen.reason
    assert isinstance(chosen.forward_blocks, TritonForward)
    assert isinstance(chosen.backward_blocks, TritonBackward)


def test_an_older_gpu_does():
    v100 = Platform("gpu", "Tesla V100", "7.0")
    chosen = choose("auto", *request(in_order=False), platform=v100)
    assert chosen.forward == "reference"
    assert "not triton: it needs an NVIDIA GPU of compute capability 8.0 or later" in chosen.reason


FORWARD_SIZES = dict(q=128, kv=64, warps=8, stages=3, overlap=True, heads=0)


def test_a_last_resort_is_taken_only_if_measured_fastest(measured):
    """A shape counts without it."""
    others = row("forward", "cudnn", 2.0), row("forward", "pallas_hopper", 1.0)
    pick = lambda: choose("auto", *request(), platform=TESTED)  # noqa: E731
    measured(*others)
    assert pick().forward == "pallas_hopper"
    for ms, wanted in ((1.5, "pallas_hopper"), (0.5, "triton")):
        measured(*others, row("forward", "triton", ms, blocks=FORWARD_SIZES))
        assert pick().forward == wanted
    assert pick().forward_blocks == TritonForward(**FORWARD_SIZES)
    measured(row("forward", "triton", 0.5, blocks=FORWARD_SIZES))
    assert pick().forward == "cudnn", "not measured beside the others"


def test_the_kind_of_a_mask():
    segments = jax.ShapeDtypeStruct((4, 4096), jnp.int32)
    documents = dict(q_segments=segments, kv_segments=segments)
    kind = lambda **mask: kind_of(request(**mask)[2])  # noqa: E731
    assert kind() == "causal"
    assert kind(window=64) == "window"
    assert kind(window=64, **documents) == "packed"
    assert kind(window=64, in_order=False, **documents) == "general"


def test_here_is_a_cpu():
    assert Platform.here().name == "cpu"
    assert Platform.here().compute_capability == ""


# --------------------------------------------------------------------------------- the files


def without(name):
    return {key: value for key, value in row("forward", "cudnn", 1.0).items() if key != name}


GOOD = row("forward", "pallas_hopper", 1.0)

MALFORMED = {
    "no JSON": ("{", "h.json: Input data was truncated"),
    "a list": ("[]", "h.json: Expected `object`, got `array`"),
    "another GPU": (table(gpu="NVIDIA H100"), "gpu = 'NVIDIA H100' must be 'NVIDIA Tested'"),
    "no commit": (table(commit=None), r"h.json: Expected `str`, got `null` - at `\$.commit`"),
    "rows of another kind": (
        json.dumps({**json.loads(table()), "rows": 3}),
        r"Expected `array`, got `int` - at `\$.rows`",
    ),
    "a row that is none": (table(GOOD, 7), r"got `int` - at `\$.rows\[1\]`"),
    "no time": (table(without("ms")), r"missing required field `ms` - at `\$.rows\[0\]`"),
    "an unknown field": (table(GOOD | {"mss": 3}), "unknown field `mss`"),
    "an unknown backend": (table(GOOD | {"backend": "flash"}), r"'flash' - at .*\.backend"),
    "an unknown kind": (table(GOOD | {"kind": "full"}), r"'full' - at .*\.kind"),
    "no length": (table(GOOD | {"T": 0}), r"`int` >= 1 - at .*\.T"),
    "a length of true": (table(GOOD | {"T": True}), r"got `bool` - at .*\.T"),
    "a time of 0": (table(GOOD | {"ms": 0}), r"> 0.* - at .*\.ms"),
    "a time that is none": (table(GOOD | {"ms": float("nan")}), "h.json: .*malformed"),
    "no blocks": (table(GOOD | {"blocks": None}), "blocks = None must be q, kv, stages, heads"),
    "few blocks": (table(GOOD | {"blocks": {"q": 64}}), "blocks = .* must be q, kv, stages, heads"),
    "a block in words": (
        table(GOOD | {"blocks": {"q": "64", "kv": [64], "stages": 2, "heads": 0}}),
        r"Expected `int`, got `str` - at `\$.q`",
    ),
    "a block of 0": (
        table(GOOD | {"blocks": {"q": 64, "kv": 0, "stages": 2, "heads": 0}}),
        "blocks = .* must be whole numbers above 0",
    ),
    "heads below 0": (
        table(GOOD | {"blocks": {"q": 64, "kv": 64, "stages": 2, "heads": -1}}),
        "blocks = .* must be whole numbers above 0",
    ),
    "an overlap in numbers": (
        table(row("forward", "triton", 1.0, blocks=FORWARD_SIZES | {"overlap": 1})),
        r"Expected `bool`, got `int` - at `\$.overlap`",
    ),
    "blocks of cudnn": (
        table(row("forward", "cudnn", 1.0, blocks={"q": 64, "kv": 64, "stages": 1, "heads": 0})),
        "blocks = .* must be null for cudnn",
    ),
    "determinism in words": (table(GOOD | {"deterministic": "no"}), r"at .*\.deterministic"),
    "a window of 0": (table(GOOD | {"window": 0}), r"`int` >= 1 - at .*\.window"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused(name):
    text, message = MALFORMED[name]
    with pytest.raises(ValueError, match=message):
        measurements.parse(text, "h.json", TESTED.kind)


def test_the_committed_files_can_be_read():
    folder = Path(attention.__file__).parent / "measured"
    for file in folder.glob("*.json"):
        gpu = json.loads(file.read_text("utf-8"))["gpu"]
        assert file.name == measurements.file_name(gpu)
        assert measurements.measurements(gpu), "without rows"


def test_the_name_of_a_file():
    assert measurements.file_name("NVIDIA H200") == "nvidia_h200.json"


# -------------------------------------------------------- the config knows what kernels declare


@pytest.mark.parametrize("backend", ["cudnn", "pallas_hopper", "triton"])
def test_validation_agrees_with_the_table(backend):
    able = CAPABILITIES[backend].head_dims
    for head_dim in (2, 12, 250, *range(16, 300, 48)):
        mixer = Attention(num_heads=8, num_kv_heads=4, head_dim=head_dim)
        layers = [Layer("layers", mixer, Glu(704))]
        cfg = replace(Config(), **{"compute.attention_backend": backend, "model.layers": layers})
        if head_dim in able:
            validate.check(cfg)
            continue
        with pytest.raises(
            ValueError, match=re.escape(f"model.layers.mixer.head_dim = {head_dim}: must be ")
        ):
            validate.check(cfg)
