"""`bench recurrence`: its shapes, its table and what it says of another project's kernels."""

import json
import sys

import pytest

from jaxpar import bench
from jaxpar.bench.recurrence import beside, command, contest
from jaxpar.bench.recurrence.shapes import NAMED, RecurrenceProblem, parse
from jaxpar.config import ConfigError
from tests.slow import slow

SMALL = RecurrenceProblem("delta_rule", 1, 40, 1, 2, 16, 32, 16, "float32")


def test_shapes():
    assert parse("qwen3_next", 64, "bfloat16") == NAMED["qwen3_next"]
    assert parse("1,40,1,2,16,32", 16, "float32") == SMALL
    assert parse("state_space:1,40,1,2,16,32", 16, "float32").rule == "state_space"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--shapes", "qwen4"], "--shapes = 'qwen4': must be one of qwen3_next"),
        (["--shapes", "1,2,3"], "--shapes = '1,2,3': must be"),
        (["--shapes", "gla:1,2,3,3,5,6"], "must be one of"),
        (["--shapes", "1,40,2,3,16,32"], "H must be a multiple of G"),
        (["--backends", "cudnn"], "'cudnn' is not one of triton, reference"),
        (["--chunk", "0"], "--chunk = 0: must be at least 1"),
        (["--card", "/"], "--card = '/': is a folder"),
    ],
)
def test_bad_options_are_one_line(argv, said):
    with pytest.raises(ConfigError, match=said) as error:
        bench.read_command(["recurrence", *argv])
    assert "\n" not in str(error.value)


def test_flops_of_one_chunk():
    """Counted by hand: 2 m n k of each product."""
    one = RecurrenceProblem("delta_rule", 1, 2, 1, 1, 4, 8, 2)
    square, states = (2 * 2 * 2 * 4, 2 * 2 * 2 * 8), 2 * 2 * 4 * 8
    assert one.flops("forward") == 2 * square[0] + 2 * square[1] + 3 * states
    assert one.flops("backward") == 4 * square[1] + 4 * square[0] + 6 * states
    assert one.flops("both") == one.flops("forward") + one.flops("backward")


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["delta_rule", slow("state_space")])
def test_a_card(rule, tmp_path, capsys):
    file = tmp_path / "card.json"
    argv = ["--shapes", f"{rule}:1,40,1,2,16,32", "--chunk", "16", "--dtype", "float32"]
    assert bench.main(["recurrence", *argv, "--repeats", "1", "--card", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(r["direction"], r["backend"]) for r in rows if "ms" in r] == [
        (direction, "reference") for direction in contest.DIRECTIONS
    ]
    assert all(max(r["error"].values()) < 1e-6 for r in rows if "ms" in r)
    refused = [row["refused"] for row in rows if row["backend"] == "triton"]
    assert len(refused) == 3 and "Hopper" in refused[0]
    assert "x reference" in capsys.readouterr().out


def test_large_shapes_need_a_gpu():
    with pytest.raises(ConfigError, match=r"T 8192.* needs a GPU"):
        bench.main(["recurrence"])


def row(backend: str, direction: str = "both", ms: float = 1.0):
    return {"backend": backend, "direction": direction, "ms": ms}


def test_the_verdict():
    rows = [row("reference", ms=4.0), row("triton", ms=1.0)]
    assert "belongs in MEASURED_FASTER" in command.verdict(rows)
    other = row("fla", ms=2.0) | {"kernel_ms": 1.6}
    assert "take 0.50 of fla's time, 0.62 of its kernels'" in command.verdict([*rows, other])
    assert "triton is slower" in command.verdict([row("reference"), row("triton", ms=2.0)])
    assert command.verdict([row("reference"), row("triton") | {"failed": "wrong"}]) == ""


def test_without_the_other_project(tmp_path):
    """The reason is that of its process."""
    forward, both = beside.fla_rows(SMALL, sys.executable, 1)
    assert "No module named" in forward["failed"] and forward["direction"] == "forward"
    assert both == forward | {"direction": "both"}
    (missing, _) = beside.fla_rows(SMALL, str(tmp_path / "python"), 1)
    assert "No such file" in missing["failed"]


def test_beside_the_other_project(tmp_path):
    """A program in its place answers as it does."""
    versions = {"keys": "shared", "fla": "0", "torch": "0", "kernel_ms": 0.5}
    answers = [
        {"direction": d, "ms": ms, **versions} for d, ms in (("forward", 1.0), ("both", 2.0))
    ]
    forward, both = beside.fla_rows(SMALL, answering(tmp_path, *answers), 3)
    assert (forward["ms"], both["ms"], both["keys"]) == (1.0, 2.0, "shared")
    assert both["kernel_ms"] == 0.5
    assert both["tflops"] == SMALL.flops("both") / 2.0 / 1e9
    assert json.loads((tmp_path / "given").read_text()) == SMALL.size | {"repeats": 3}


def test_a_program_that_is_stopped_keeps_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "LIMIT", 1)
    answer = {"direction": "forward", "ms": 1.0, "kernel_ms": 0.5}
    answer |= {"keys": "shared", "fla": "0", "torch": "0"}
    program = answering(tmp_path, answer, then="exec sleep 60")
    forward, both = beside.fla_rows(SMALL, program, 3)
    assert forward["ms"] == 1.0 and both["failed"] == "stopped after 1 s"


def answering(folder, *answers, then=""):
    """A Python that writes lines, whatever it shall run."""
    lines = "".join(f"echo '{json.dumps(answer)}'\n" for answer in answers)
    program = folder / "python"
    program.write_text(f"#!/bin/sh\ncat > {folder}/given\n{lines}{then}\n")
    program.chmod(0o755)
    return str(program)
