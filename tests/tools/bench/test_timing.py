"""The timing of programs in turns, and of the pieces between the matmuls."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from jaxpar.runtime import timing


def test_programs_take_turns(monkeypatch):
    order = []
    monkeypatch.setattr(timing, "_launches", lambda program, seconds: 1)

    def program(name):
        order.append(name)
        if name == "b" and len(order) > 4:
            raise RuntimeError("broke")

    found = timing.time_interleaved({n: lambda n=n: program(n) for n in "ab"}, 4)
    assert "".join(order) == "abababa"
    assert found["a"].fastest <= found["a"].ms <= found["a"].slowest
    assert str(found["b"]) == "broke"


def test_a_sustained_batch_is_timed_once_the_clocks_have_settled(monkeypatch):
    batches = []

    def batch(program, launches):
        batches.append(launches)
        program()
        return 1e-3 * len(batches)

    monkeypatch.setattr(timing, "_batch", batch)
    monkeypatch.setattr(timing, "_launches", lambda program, seconds: round(seconds / 1e-3))
    found = timing.time_interleaved(
        {"a": lambda: None}, 2, timing.Sustained(settle=0.02, timed=0.04)
    )
    assert batches == [20, 40, 20, 40] and found["a"].launches == 40
    assert (found["a"].fastest, found["a"].slowest) == (2, 4), "of the second and the fourth"


def test_the_pieces_between_the_matmuls(tmp_path, monkeypatch, capsys):
    path = Path(__file__).resolve().parents[3] / "scripts" / "measure" / "elementwise.py"
    spec = importlib.util.spec_from_file_location("elementwise", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "COPY_BYTES_CPU", 1 << 20)
    file = tmp_path / "pieces.json"
    script.main(["--tokens", "16", "--repeats", "2", "--card", str(file)])
    rows = {row["piece"]: row for row in json.loads(file.read_text())["rows"]}
    wide, ff = 16 * 4096 * 2, 16 * 14336 * 2
    assert rows["residual add"]["bytes"] == 3 * wide
    assert rows["RMSNorm forward"]["bytes"] == 2 * wide + 4096 * 4
    assert rows["SwiGLU forward"]["bytes"] == 3 * ff and rows["SwiGLU backward"]["bytes"] == 5 * ff
    assert all(row["ms"] > 0 for row in rows.values())
    for option, value in [("--tokens", "0"), ("--repeats", "0"), ("--card", str(tmp_path))]:
        with pytest.raises(SystemExit) as stop:
            script.main([option, value])
        said = capsys.readouterr().err
        assert stop.value.code == 2 and f"error: {option} = " in said and "Fix: use" in said


def test_the_ports_are_compared_and_what_fails_is_reported(tmp_path, capsys):
    """Neither compiler of Pallas is there on a CPU."""
    path = Path(__file__).resolve().parents[3] / "scripts" / "measure" / "elementwise_ports.py"
    spec = importlib.util.spec_from_file_location("elementwise_ports", path)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    file = tmp_path / "ports.json"
    only = ["8B: round", "8B, tensor 8", "8B: SwiGLU"]
    script.main(["--shrink", "128", "--repeats", "1", "--only", *only, "--card", str(file)])
    rows = {(row["case"], row["kernel"]): row for row in json.loads(file.read_text())["rows"]}
    assert len(rows) == 8 * 3
    for (case, kernel), row in rows.items():
        assert ("failed" in row) == (kernel != "xla"), case
    assert rows["8B: round a gradient", "xla"]["error"] == "0.0e+00"
    assert float(rows["8B: SwiGLU, scaled rows", "xla"]["error"]) < 2**-8
    with pytest.raises(SystemExit):
        script.main(["--shrink", "0"])
    assert "error: --shrink = 0" in capsys.readouterr().err
