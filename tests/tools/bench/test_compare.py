"""Cards side by side: figures with ratios, what differs, what to beware of, what is refused."""

import copy
import json
from pathlib import Path

import pytest

from jaxpar.commands import call
from jaxpar.config import ConfigError

BENCHMARKS = Path(__file__).resolve().parents[3] / "docs" / "benchmarks"

TRAIN = {
    "tokens_per_second_per_device": 10000.0,
    "mfu_causal": 0.5,
    "mfu_full_attention": 0.55,
    "step_seconds": {"median": 1.6, "fastest": 1.59, "slowest": 1.7, "interquartile": 0.004},
    "peak_memory_gib": 80.0,
    "collective_bytes": {"bytes": 34_500_000_000, "kinds": {}, "unknown": []},
    "profile": {
        "ms": {"step": 1577.5, "compute": 1513.4, "exposed": 61.5, "idle": 2.6},
        "worst_device_ms": {"exposed": 65.7},
        "by_class": {"matmul": {"ms": 1083.0, "count": 504}},
        "communication": {"all-gather": {"ms": 120.9, "exposed_ms": 34.3, "count": 66}},
    },
    "device": "4 x NVIDIA H200",
    "gpu": "NVIDIA H200, 580.159.04, 700.00 W",
    "xla_flags": "--xla_a=1 --xla_b=",
    "environment": ["--xla_a=1", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.92"],
    "commit": "aaaa",
    "config": {
        "model": {"num_layers": 32},
        "compute": {"attention_backend": "auto", "matmul_dtype": "compute"},
        "data": {"seq_len": 8192},
        "parallel": {"remat": "dots"},
    },
}


def changed(card: dict, **changes) -> dict:
    """A card with other values at paths, whose keys are joined by two underscores."""
    card = copy.deepcopy(card)
    for path, value in changes.items():
        *above, last = path.split("__")
        inside = card
        for key in above:
            inside = inside[key]
        inside[last] = value
    return card


@pytest.fixture
def compare(tmp_path, capsys):
    """(cards) -> the lines that comparing them prints."""

    def run(*cards: dict) -> list[str]:
        files = []
        for n, card in enumerate(cards):
            files.append(tmp_path / f"card{n}.json")
            files[-1].write_text(json.dumps(card))
        assert not call("profile", list(map(str, files)))
        return capsys.readouterr().out.splitlines()

    return run


def row(lines: list[str], label: str) -> list[str]:
    """The cells of the one line that begins so."""
    (line,) = [line for line in lines if line.strip().startswith(label)]
    return line.strip()[len(label) :].split()


def test_figures_and_ratios(compare):
    b = changed(
        TRAIN,
        tokens_per_second_per_device=11000.0,
        step_seconds__median=1.4545,
        profile__ms__exposed=30.75,
    )
    lines = compare(TRAIN, b, TRAIN)
    assert lines[0].startswith("A  ") and lines[2].endswith("card2.json")
    assert row(lines, "tokens/s/device") == ["10,000", "11,000", "1.100", "10,000", "1.000~"]
    assert row(lines, "step, median ms")[:3] == ["1,600.0", "1,454.5", "0.909"]
    assert row(lines, "MFU, causal")[:2] == ["50.0%", "50.0%"]
    assert row(lines, "exposed  ")[:3] == ["61.5", "30.8", "0.500"]
    assert row(lines, "exposed: all-gather ms")[0] == "34.3"
    assert row(lines, "kernels: matmul ms")[0] == "1,083.0"
    assert row(lines, "GB sent per step")[0] == "34.500"
    assert not any("data wait" in line for line in lines)  # no card has it


def test_a_difference_within_the_spread_is_noise(compare):
    lines = compare(TRAIN, changed(TRAIN, step_seconds__median=1.603))
    assert any("differ by 3.0 ms, within the spread of 4.0 ms" in line for line in lines)
    assert row(lines, "step, median ms")[-1] == "1.002~"
    lines = compare(TRAIN, changed(TRAIN, step_seconds__median=1.605))
    assert not any("noise" in line or "~" in line for line in lines)


def test_conditions_that_differ(compare):
    b = changed(
        TRAIN,
        commit="bbbb",
        gpu="NVIDIA H200, 590.1, 600.00 W",
        xla_flags="--xla_a=2",
        config__parallel__remat="none",
    )
    lines = compare(TRAIN, b)
    assert row(lines, "commit") == ["aaaa", "bbbb"]
    assert row(lines, "driver") == ["580.159.04", "590.1"]
    assert row(lines, "power limit") == ["700.00", "W", "600.00", "W"]
    assert row(lines, "--xla_a") == ["1", "2"] and row(lines, "--xla_b") == ["(empty)", "-"]
    assert row(lines, "config.parallel.remat") == ["dots", "none"]
    assert not any("warning" in line or "num_layers" in line for line in lines)
    assert compare(TRAIN, TRAIN)[-1] == "The conditions are the same."


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("gpu", "NVIDIA B200, 1, 2 W", "gpu is NVIDIA H200 in A, NVIDIA B200 in B"),
        ("device", "8 x NVIDIA H200", "device is 4 x NVIDIA H200 in A, 8 x NVIDIA H200 in B"),
        ("config__model__num_layers", 16, "config.model.num_layers is 32 in A, 16 in B"),
        (
            "config__compute__matmul_dtype",
            "float8",
            "config.compute.matmul_dtype is compute in A, float8 in B",
        ),
        ("config__data__seq_len", 4096, "config.data.seq_len is 8192 in A, 4096 in B"),
    ],
)
def test_what_ought_to_agree(compare, path, value, said):
    lines = compare(TRAIN, changed(TRAIN, **{path: value}))
    (warning,) = [line for line in lines if line.startswith("warning")]
    assert warning == f"warning: not comparable: {said}"


def test_another_backend_is_the_same_model(compare):
    lines = compare(TRAIN, changed(TRAIN, config__compute__attention_backend="cudnn"))
    assert not any("warning" in line for line in lines)
    assert row(lines, "config.compute.attention_backend") == ["auto", "cudnn"]


def test_the_older_cards(capsys):
    """What they lack is shown as such, or left out."""
    train = sorted(str(f) for f in BENCHMARKS.glob("llama3_8b*.json"))
    assert len(train) >= 3
    assert not call("profile", train)
    lines = capsys.readouterr().out.splitlines()
    assert len(row(lines, "tokens/s/device")) == 2 * len(train) - 1


def test_torchtitans_card_beside_ours(capsys):
    names = "llama3_8b-h200x4-none.json", "torchtitan-8b-h200x4-fsdp.json"
    assert not call("profile", [str(BENCHMARKS / name) for name in names])
    lines = capsys.readouterr().out.splitlines()
    assert row(lines, "tokens/s/device")[:2] == ["10,779", "10,395"]
    assert row(lines, "step, median ms")[1] == "-"


def test_a_new_card_beside_an_older_one(compare):
    older = changed(TRAIN)
    del older["profile"], older["collective_bytes"], older["step_seconds"]["interquartile"]
    lines = compare(older, TRAIN)
    assert row(lines, "profiled step ms") == ["-", "1,577.5", "-"]
    lines = compare(TRAIN, changed(TRAIN, profile=None, collective_bytes=None))
    assert row(lines, "profiled step ms") == ["1,577.5", "-", "-"]


def test_a_published_card_lacks_fields_that_are_not_compared(compare):
    config = {"model.num_layers": 32, "data.seq_len": 8192, "parallel.remat": "none"}
    said = "\n".join(compare(TRAIN, changed(TRAIN, config=config)))
    assert "config.parallel.remat" in said
    assert "attention_backend" not in said and "not comparable" not in said


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -5.0, 10**400, "fast", True])
def test_what_is_no_figure_is_left_out_and_said(compare, value):
    lines = compare(TRAIN, changed(TRAIN, tokens_per_second_per_device=value))
    assert row(lines, "tokens/s/device") == ["10,000", "-", "-"]
    (note,) = [line for line in lines if line.startswith("note")]
    assert note.startswith(
        "note: tokens_per_second_per_device of B is not a number and was skipped: "
    )
    assert len(note) < 120


def test_text_of_a_card_cannot_break_the_lines(compare):
    wrong = changed(TRAIN, commit="a\nb\x1b[31m", config__parallel={"r\n": "\ud800"})
    lines = compare(TRAIN, wrong)
    assert row(lines, "commit") == ["aaaa", r"a\nb\x1b[31m"]
    assert row(lines, r"config.parallel.r\n") == ["-", r"\ud800"]


def refusal(*files) -> str:
    """What is said of the files."""
    with pytest.raises(ConfigError) as error:
        call("profile", list(map(str, files)))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_refusals(tmp_path):
    files = {name: tmp_path / f"{name}.json" for name in ("train", "text", "list", "loss")}
    files["train"].write_text(json.dumps(TRAIN))
    files["text"].write_text("hello")
    files["list"].write_text("[1]")
    files["loss"].write_text(json.dumps({"what": "loss", "rows": []}))
    train = files["train"]
    assert "must be at least two cards" in refusal(train)
    assert "cannot be read: No such file" in refusal(train, tmp_path / "none.json")
    assert "cannot be read" in refusal(train, tmp_path)
    assert "is not JSON: Expecting value" in refusal(files["text"], train)
    assert "is not a card but a JSON list" in refusal(train, files["list"])
    assert "is not a card of --bench" in refusal(train, files["loss"])
    kernels = BENCHMARKS / "attention-h200.json"
    assert "is not a card of --bench" in refusal(train, kernels)
    with pytest.raises(ConfigError, match="RUN_OR_TRACE = '': is missing"):
        call("profile", [])
