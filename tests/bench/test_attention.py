"""The attention benchmark: what it counts, what its card and its table hold, what it refuses."""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar import bench
from jaxpar.bench import timing
from jaxpar.bench.attention import command as attention
from jaxpar.bench.attention import contest, exactness, tuning
from jaxpar.bench.attention.shapes import (
    DOCUMENTS,
    ZIGZAG,
    document_lengths,
    draw,
    make_shape,
    parse_shapes,
)
from jaxpar.config import ConfigError
from jaxpar.kernels.attention import api, reference
from jaxpar.kernels.attention.dispatch.capability import kind_of
from jaxpar.kernels.attention.dispatch.measurements import parse
from jaxpar.kernels.attention.mask import dense_mask
from tests.slow import slow_but

SMALL = (2, 96, 4, 2, 8)
KINDS = ("causal", "packed", "window", "zigzag")


@pytest.fixture(autouse=True)
def short_batches(monkeypatch):
    """No time is judged here."""
    monkeypatch.setattr(timing, "BATCH_SECONDS", 1e-3)
    monkeypatch.setattr(tuning, "AT_THE_LIMIT", timing.Sustained(settle=1e-3, timed=1e-3))


def run(*argv: str) -> int:
    """The benchmark, with the fewest repeats."""
    return bench.main(["attention", "--repeats", "2", *argv])


# ---------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_counted_as_the_mask_leaves_them(kind):
    shape = make_shape(kind, *SMALL)
    pairs = int(np.asarray(dense_mask(shape.mask())).sum())
    assert shape.seen() == pairs
    assert shape.useful_flops("forward") == 4 * 4 * 8 * pairs
    assert shape.useful_flops("both") == 3.5 * shape.useful_flops("forward")
    assert shape.kind == kind_of(shape.mask())


def test_masks_are_what_a_training_step_passes():
    packed = make_shape("packed", *SMALL)
    assert len(packed.documents) == DOCUMENTS == packed.mask().max_segments
    assert sum(packed.documents) == 96 and min(packed.documents) > 0
    zigzag = make_shape("zigzag", *SMALL)
    assert (zigzag.T, zigzag.S) == (96 // ZIGZAG, 96)
    assert zigzag.positions().tolist() == [*range(12, 24), *range(72, 84)]
    assert sorted(zigzag.key_order()) == list(range(96))


def test_documents_lie_off_the_tiles_in_few_lengths():
    lengths = document_lengths(32768)
    assert lengths == document_lengths(32768) and sum(lengths) == 32768
    assert all(cut % 64 for cut in np.cumsum(lengths)[:-1])
    assert 4 < len(set(lengths)) <= DOCUMENTS


def test_shapes_of_the_command_line():
    shapes = parse_shapes(["causal,zigzag", "2,64,4,2,8", "window:1,96,2,1,8"])
    assert [s.name for s in shapes] == ["causal"] * 5 + ["zigzag", "causal", "window"]
    assert shapes[-1].window == 12 and shapes[-2].size == dict(B=2, T=64, S=64, H=4, G=2, D=8)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--shapes", "causal,sideways"], "'sideways' is not a shape"),
        (["--shapes", "1,64,3,2,8"], "H a multiple of G"),
        (["--shapes", "packed:1,100,2,1,8"], "T of packed must be a multiple of 32"),
        (["--backends", "reference,flash"], "'flash' is not one of cudnn"),
        (["--repeats", "0"], "--repeats = 0: must be at least 1"),
        (["--table", "t.json"], "is used only with --tune"),
        (["--card", "/"], "--card = '/': is a folder, not a file"),
        (["--tune", "--table", ""], "--table = '': is empty"),
        (["--tune", "--table", "/"], "--table = '/': is a folder, not a file"),
        (["--tune", "--table", __file__], "cannot be read: "),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--tune"], "is required without a GPU"),
    ],
)
def test_bad_options_are_one_line(argv, said):
    with pytest.raises(ConfigError, match=said) as error:
        run(*argv)
    assert "\n" not in str(error.value)


def test_the_programs_are_named_when_none_is_given(capsys):
    assert bench.main([]) == 0 and bench.main(["--help"]) == 0
    assert capsys.readouterr().out.count("attention       time, TFLOP/s") == 2
    with pytest.raises(
        ConfigError, match="'traim': must be one of train, scaling, attention, matmuls, recur"
    ):
        bench.main(["traim"])


# ------------------------------------------------------------------------------ measurements


@pytest.mark.parametrize("kind", slow_but(["causal", "packed"], KINDS))
def test_the_blocked_reference_is_the_reference(kind, monkeypatch):
    monkeypatch.setattr(exactness, "ROWS", 40)
    asked = draw(make_shape(kind, *SMALL), "float32")
    kernel = contest.BackendPrograms("reference")
    saved, grads = kernel.both([asked])
    part, found = exactness.one_group(asked, saved[0][0], grads[0])
    assert part.q.shape[0] == part.k.shape[2] == 1 and part.q.shape[2] == 2
    errors = exactness.errors(found, exactness.exact(part))
    assert errors.keys() == {"out", "dq", "dk", "dv"} and max(errors.values()) < 1e-5


def test_a_gradient_that_is_0_has_an_error():
    """A query that sees one key alone: the exact gradient is nothing to divide by."""
    asked = draw(make_shape("causal", 1, 1, 2, 1, 8), "float32")
    saved, grads = contest.BackendPrograms("reference").both([asked])
    part, found = exactness.one_group(asked, saved[0][0], grads[0])
    wanted = exactness.exact(part)
    assert float(abs(wanted[1]).max()) < 1e-6
    assert exactness.wrong(exactness.errors(found, wanted)) == ""
    out, dq, dk, dv = found
    assert "dq 1.0e+03" in exactness.wrong(exactness.errors((out, dq + 1, dk, dv), wanted))
    assert "dq nan" in exactness.wrong(exactness.errors((out, dq * np.nan, dk, dv), wanted))


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


def test_repeats_are_fewer_where_each_is_long():
    assert attention.read_command([]).repeats == attention.REPEATS
    assert attention.read_command(["--tune"]).repeats == tuning.REPEATS < attention.REPEATS
    assert attention.read_command(["--tune", "--repeats", "9"]).repeats == 9


@pytest.mark.slow
def test_a_card(tmp_path, capsys):
    file = tmp_path / "cards" / "attention.json"
    shapes = ["--shapes", "1,64,2,1,8", "packed:1,64,2,1,8"]
    backends = ["--backends", "cudnn,reference"]
    assert (
        run(*shapes, *backends, "--dtype", "float32", "--card", str(file), "--commit", "abc") == 0
    )
    card = json.loads(file.read_text())
    assert card["commit"] == "abc" and "--shapes 1,64,2,1,8" in card["command"]
    assert {"jax", "device", "xla_flags", "gpu", "cudnn", "environment"} <= card.keys()
    assert len(card["rows"]) == 2 * 3 * 2
    for row in card["rows"]:
        if row["backend"] == "cudnn":
            assert "needs an NVIDIA GPU" in row["refused"]
            continue
        if row["kind"] == "causal" and row["direction"] == "backward":
            assert row["useful_flops"] == 10 * 2 * 8 * 64 * 65 / 2
        assert row["tflops"] == pytest.approx(row["useful_flops"] / row["ms"] / 1e9)
        assert max(row["error"].values()) < 1e-5
        assert ("yardstick" in row) == (row["kind"] == "packed")
    said = capsys.readouterr()
    assert "packed B=1 T=64 H=2 G=1 D=8, float32, 16 documents" in said.out
    assert "refused: it " in said.out
    assert "[2/2] packed B=1 T=64 H=2 G=1 D=8: timing backward, reference" in said.err


def test_large_shapes_want_a_gpu():
    with pytest.raises(ConfigError, match="needs a GPU: without one"):
        run()


def test_a_failure_is_a_row_and_code_1(monkeypatch, capsys):
    class Broken:
        forward = staticmethod(reference.forward)

        @staticmethod
        def backward(*args):
            raise ValueError("no such tile\nand much more")

    monkeypatch.setitem(api.BACKENDS, "reference", Broken)
    assert run("--shapes", "1,64,2,1,8", "--backends", "reference") == 1
    said = capsys.readouterr()
    assert said.out.count("failed: ValueError: no such tile\n") == 2
    assert "2 of 3 measurements failed" in said.err


# ------------------------------------------------------------------------------------ tuning


def tuned(table, *argv: str) -> dict:
    shape = ["--shapes", "1,64,2,1,8", "--backends", "reference"]
    assert run(*shape, "--tune", "--table", str(table), *argv) == 0
    return json.loads(table.read_text())


def test_a_table_is_written_and_added_to(tmp_path, capsys):
    path = tmp_path / "table.json"
    first = tuned(path, "--commit", "abc")
    assert [row["direction"] for row in first["rows"]] == ["forward", "backward"]
    again = tuned(path, "--commit", "abc")
    assert len(again["rows"]) == 2, "measured anew, not twice"
    more = tuned(path, "--commit", "def", "--shapes", "packed:1,64,2,1,8")
    assert len(more["rows"]) == 4 and more["rows"][-1]["documents"] == DOCUMENTS
    assert more["commit"] == "abc && def"
    rows = parse(path.read_text(), path.name, jax.devices()[0].device_kind)
    assert [row.kind for row in rows] == ["causal"] * 2 + ["packed"] * 2
    assert "fastest backward: reference" in capsys.readouterr().out


def test_rows_of_other_versions_are_dropped_and_of_other_gpus_refused(tmp_path, capsys):
    path = tmp_path / "table.json"
    table = tuned(path)
    path.write_text(json.dumps(table | {"jax": "0.0.1"}))
    assert len(tuned(path, "--shapes", "packed:1,64,2,1,8")["rows"]) == 2
    assert "2 from another JAX or cuDNN dropped" in capsys.readouterr().out
    path.write_text(json.dumps(table | {"gpu": "NVIDIA Other"}))
    with pytest.raises(ConfigError, match="contains times of 'NVIDIA Other'"):
        tuned(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"gpu": "cpu", "jax"', "cannot be read: "),
        ("[]", "is no table of measurements"),
        ('{"gpu": "cpu", "jax": 1, "cudnn": 0, "rows": []}', "is no table of measurements"),
        ('{"gpu": "cpu", "jax": "", "cudnn": 0, "rows": [1]}', "has rows that are none"),
        ('{"gpu": "B", "jax": "", "cudnn": 0, "rows": []}', "contains times of 'B'"),
    ],
)
def test_a_table_that_cannot_be_added_to_is_refused_first(text, said, tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    path.write_text(text)
    monkeypatch.setattr(tuning, "tune", lambda *_: pytest.fail("something was measured"))
    with pytest.raises(ConfigError, match=said):
        tuned(path)
    assert path.read_text() == text


def test_candidates_of_our_own_kernels():
    sizes = tuning.candidates(["cudnn", "pallas_hopper"], "backward", 64)
    assert sizes[0] == tuning.TuningCandidate("backward", "cudnn")
    ours = sizes[1:]
    assert len(ours) >= 2 and all(c.sizes is not None for c in ours)
    assert {c.deterministic for c in ours} == {False, True}
    assert ours[0].row()["blocks"].keys() == {"q", "kv", "stages", "heads"}


def test_a_wrong_result_is_a_failure_and_stays_out_of_the_table(tmp_path, monkeypatch, capsys):
    class Wrong:
        forward = staticmethod(
            lambda *args: jax.tree.map(lambda x: 2 * x, reference.forward(*args))
        )
        backward = staticmethod(reference.backward)

    monkeypatch.setitem(api.BACKENDS, "reference", Wrong)
    table = tmp_path / "table.json"
    shape = ["--shapes", "1,64,2,1,8", "--backends", "reference"]
    assert run(*shape, "--tune", "--table", str(table)) == 1
    assert json.loads(table.read_text())["rows"] == []
    assert run(*shape) == 1
    assert "1.0e+00  wrong result: relative error of out 1.0e+00" in capsys.readouterr().out


def test_block_sizes_that_fail_are_passed_over():
    row = dict(shape="causal", **make_shape("causal", *SMALL).size, deterministic=False)
    row |= dict(direction="forward", backend="pallas_hopper")
    works, fails = row | {"ms": 1.0}, row | {"failed": "too much shared memory"}
    other = fails | {"direction": "backward"}
    assert tuning.hopeless([works, fails, other]) == [other]


# ------------------------------------------------------------------------- loss, elementwise


def test_the_loss_table(tmp_path, capsys):
    file = tmp_path / "loss.json"
    sizes = ["--tokens", "64,128", "--vocab", "256", "--d-model", "16", "--dtype", "float32"]
    assert bench.main(["loss", *sizes, "--card", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["tokens"] for row in rows] == [64, 128]
    assert rows[0]["logits_gib"] == 64 * 256 * 4 / 2**30
    assert all(row["plain_gib"] > row["logits_gib"] for row in rows)
    assert "logits GiB" in capsys.readouterr().out
    cut = [*sizes, "--vocab", "4096", "--chunks", "16", "--card", str(file)]
    assert bench.main(["loss", *cut]) == 0
    assert [row["chunks"] for row in json.loads(file.read_text())["rows"]] == [16, 16]
    at_once = [
        *sizes,
        "--vocab",
        "4096",
        "--logits-dtype",
        "compute",
        "--card",
        str(tmp_path / "b"),
    ]
    assert bench.main(["loss", *at_once, "--chunks", "1"]) == 0
    few, all_of_them = (json.loads((tmp_path / n).read_text())["rows"] for n in ("loss.json", "b"))
    assert all(a["ours_gib"] < b["ours_gib"] for a, b in zip(few, all_of_them, strict=True))
    with pytest.raises(ConfigError, match="--chunks = -1: must be at least 0"):
        bench.main(["loss", "--chunks", "-1"])
    with pytest.raises(ConfigError, match="positive integers"):
        bench.main(["loss", "--tokens", "64,x"])
    with pytest.raises(ConfigError, match="--card = '/': is a folder"):
        bench.main(["loss", "--tokens", "64", "--card", "/"])


def test_the_pieces_between_the_matmuls(tmp_path, monkeypatch, capsys):
    path = Path(__file__).resolve().parents[2] / "scripts" / "measure" / "elementwise.py"
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
