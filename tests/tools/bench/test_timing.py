"""The timing of programs in turns, and of the pieces between the matmuls."""

import importlib.util
import json
from pathlib import Path

import pytest

from scripts.measure import interleaved


def test_programs_take_turns(monkeypatch):
    order = []
    monkeypatch.setattr(interleaved, "_launches", lambda program, seconds: 1)

    def program(name):
        order.append(name)
        if name == "b" and len(order) > 4:
            raise RuntimeError("broke")

    found = interleaved.time_interleaved({n: lambda n=n: program(n) for n in "ab"}, 4)
    assert "".join(order) == "abababa"
    assert found["a"].fastest <= found["a"].ms <= found["a"].slowest
    assert str(found["b"]) == "broke"


def test_a_sustained_batch_is_timed_once_the_clocks_have_settled(monkeypatch):
    batches = []

    def batch(program, launches):
        batches.append(launches)
        program()
        return 1e-3 * len(batches)

    monkeypatch.setattr(interleaved, "_batch", batch)
    monkeypatch.setattr(interleaved, "_launches", lambda program, seconds: round(seconds / 1e-3))
    found = interleaved.time_interleaved(
        {"a": lambda: None}, 2, interleaved.Sustained(settle=0.02, timed=0.04)
    )
    assert batches == [20, 40, 20, 40] and found["a"].launches == 40
    assert (found["a"].fastest, found["a"].slowest) == (2, 4), "of the second and the fourth"


@pytest.mark.slow
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
    assert rows["round gradient, XLA"]["bytes"] == 2 * ff + 4
    assert rows["exponentials, XLA"]["bytes"] == 2 * 16 * 128256 * 2 + 2 * 16 * 4
    assert len([name for name in rows if name.endswith(", XLA")]) == 8 and len(rows) == 17
    assert rows["SwiGLU forward"]["bytes"] == 3 * ff and rows["SwiGLU backward"]["bytes"] == 5 * ff
    assert all(row["ms"] > 0 for row in rows.values())
    for option, value in [("--tokens", "0"), ("--repeats", "0"), ("--card", str(tmp_path))]:
        with pytest.raises(SystemExit) as stop:
            script.main([option, value])
        said = capsys.readouterr().err
        assert stop.value.code == 2 and f"error: {option} = " in said and "Fix: use" in said
