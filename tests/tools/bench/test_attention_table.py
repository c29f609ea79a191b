"""scripts/measure/attention_table.py: what it counts, what its table holds, what it refuses."""

import json

import jax
import numpy as np
import pytest

from jaxpar.config import ConfigError
from jaxpar.kernels.attention import api, reference
from jaxpar.kernels.attention.capability import kind_of
from jaxpar.kernels.attention.choice import parse
from jaxpar.kernels.attention.mask import dense_mask
from scripts.measure import attention_shapes as exactness
from scripts.measure import attention_table as tuning
from scripts.measure import interleaved
from scripts.measure.attention_shapes import (
    DOCUMENTS,
    ZIGZAG,
    BackendPrograms,
    document_lengths,
    draw,
    make_shape,
    parse_shapes,
)

SMALL = (2, 96, 4, 2, 8)
KINDS = ("causal", "packed", "window", "zigzag")


@pytest.fixture(autouse=True)
def short_batches(monkeypatch):
    """No time is judged here."""
    monkeypatch.setattr(interleaved, "BATCH_SECONDS", 1e-3)
    monkeypatch.setattr(tuning, "AT_THE_LIMIT", interleaved.Sustained(settle=1e-3, timed=1e-3))


def run(*argv: str) -> int:
    """The script, with few repeats."""
    return tuning.main(["--repeats", "2", *argv])


# ---------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_counted_as_the_mask_leaves_them(kind):
    shape = make_shape(kind, *SMALL)
    pairs = int(np.asarray(dense_mask(shape.mask())).sum())
    assert shape.seen() == pairs
    assert shape.useful_flops("forward") == 4 * 4 * 8 * pairs
    assert shape.useful_flops("backward") == 2.5 * shape.useful_flops("forward")
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
        (["--table", ""], "--table = '': is empty"),
        (["--table", "/"], "--table = '/': is a folder, not a file"),
        (["--table", __file__], "cannot be read: "),
        (["--nonsense"], "'--nonsense': is not an option of python scripts"),
        ([], "is required without a GPU"),
    ],
)
def test_bad_options_are_one_line(argv, said):
    with pytest.raises(ConfigError, match=said) as error:
        run(*argv)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------ measurements


def reference_group(asked):
    kernel = BackendPrograms("reference")
    saved = kernel.forward(asked)
    return exactness.one_group(asked, saved[0], kernel.backward(asked, saved))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_blocked_reference_is_the_reference(kind, monkeypatch):
    monkeypatch.setattr(exactness, "ROWS", 40)
    asked = draw(make_shape(kind, *SMALL), "float32")
    part, found = reference_group(asked)
    assert part.q.shape[0] == part.k.shape[2] == 1 and part.q.shape[2] == 2
    errors = exactness.errors(found, exactness.exact(part))
    assert errors.keys() == {"out", "dq", "dk", "dv"} and max(errors.values()) < 1e-5


def test_a_gradient_that_is_0_has_an_error():
    """A query that sees one key alone: the exact gradient is nothing to divide by."""
    asked = draw(make_shape("causal", 1, 1, 2, 1, 8), "float32")
    part, found = reference_group(asked)
    wanted = exactness.exact(part)
    assert float(abs(wanted[1]).max()) < 1e-6
    assert exactness.wrong(exactness.errors(found, wanted)) == ""
    out, dq, dk, dv = found
    assert "dq 1.0e+03" in exactness.wrong(exactness.errors((out, dq + 1, dk, dv), wanted))
    assert "dq nan" in exactness.wrong(exactness.errors((out, dq * np.nan, dk, dv), wanted))


# ------------------------------------------------------------------------------------ tuning


def tuned(table, shape: str = "1,64,2,1,8") -> dict:
    assert run("--shapes", shape, "--backends", "reference", "--table", str(table)) == 0
    return json.loads(table.read_text())


def test_a_table_is_written_and_added_to(tmp_path, monkeypatch, capsys):
    path = tmp_path / "table.json"
    monkeypatch.setattr(tuning.provenance, "checked_out_commit", lambda: "abc")
    first = tuned(path)
    assert [row["direction"] for row in first["rows"]] == ["forward", "backward"]
    again = tuned(path)
    assert len(again["rows"]) == 2, "measured anew, not twice"
    monkeypatch.setattr(tuning.provenance, "checked_out_commit", lambda: "def")
    more = tuned(path, "packed:1,64,2,1,8")
    assert len(more["rows"]) == 4 and more["rows"][-1]["documents"] == DOCUMENTS
    assert more["commit"] == "abc && def"
    rows = parse(path.read_text(), path.name, jax.devices()[0].device_kind)
    assert [row.kind for row in rows] == ["causal"] * 2 + ["packed"] * 2
    assert "fastest backward: reference" in capsys.readouterr().out


def test_rows_of_other_versions_are_dropped_and_of_other_gpus_refused(tmp_path, capsys):
    path = tmp_path / "table.json"
    table = tuned(path)
    path.write_text(json.dumps(table | {"jax": "0.0.1"}))
    assert len(tuned(path, "packed:1,64,2,1,8")["rows"]) == 2
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
    assert run(*shape, "--table", str(table)) == 1
    assert json.loads(table.read_text())["rows"] == []
    assert "wrong result: relative error of out 1.0e+00" in capsys.readouterr().out


def test_block_sizes_that_fail_are_passed_over():
    row = dict(shape="causal", **make_shape("causal", *SMALL).size, deterministic=False)
    row |= dict(direction="forward", backend="pallas_hopper")
    works, fails = row | {"ms": 1.0}, row | {"failed": "too much shared memory"}
    other = fails | {"direction": "backward"}
    assert tuning.hopeless([works, fails, other]) == [other]
