"""Rows that are no documents: named, or left out, counted and recorded. In every format."""

import gzip
import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpar.data.formats.meta import read_meta
from tests.data.commands import main

GOOD = [f"text {i}" for i in range(20)]
LINES = [json.dumps({"text": text}) for text in GOOD]
BROKEN = ['{"text": null}', '{"body": "x"}', '{"text": 3}', '{"text": "cut', "[1]", "nothing"]
BROKEN += ['{"text": "\\ud800"}', '"text"', "null", '{"text": ["a"]}']


def tar(members: list[tuple[str, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return out.getvalue()


def table(ending: str) -> bytes:
    """Nulls, and a text that is not UTF-8."""
    texts = [GOOD[0], None, *GOOD[1:], "\0\0\0"]
    column = pa.array(texts)
    spoilt = column.buffers()[2].to_pybytes().replace(b"\0\0\0", b"\xff\xfe\xfd")
    column = pa.Array.from_buffers(
        pa.string(), len(texts), [*column.buffers()[:2], pa.py_buffer(spoilt)]
    )
    out, data = io.BytesIO(), pa.table({"text": column})
    if ending == ".parquet":
        pq.write_table(data, out)
    else:
        with pa.ipc.new_file(out, data.schema) as writer:
            writer.write_table(data)
    return out.getvalue()


def mixed(broken: list[str]) -> bytes:
    """Each broken line after a good one; one is not UTF-8."""
    pairs = zip(LINES, [*broken, *[""] * (len(LINES) - len(broken))], strict=True)
    return "\n".join(line for pair in pairs for line in pair).encode() + b'\n{"text": "\xff"}\n'


#: A file, its bad rows, the place and the reason of the first, and options.
FILES = {
    "a.jsonl": (mixed(BROKEN), 11, ":2", "field 'text' must be text, not NoneType", []),
    "a.json.gz": (gzip.compress(mixed(BROKEN)), 11, ":2", "field 'text' must be", []),
    "b.json": (mixed(BROKEN[3:]), 8, ":2", "is not valid JSON", []),
    "first.json": (b'{"text": "cut\n' + mixed([]), 2, ":1", "is not valid JSON", []),
    "array.json": (
        b'[{"text": 1},\n' + ",\n".join(LINES).encode() + b", null]",
        2,
        ":1",
        "field 'text' must be text, not int",
        [],
    ),
    "a.parquet": (table(".parquet"), 2, ", row 2", "column 'text' must be text, not NoneType", []),
    "a.arrow": (table(".arrow"), 2, ", row 2", "column 'text' must be text, not NoneType", []),
    "a.tar": (
        tar(
            [(f"{i}.txt", text.encode()) for i, text in enumerate(GOOD)]
            + [("x.txt", b"\xff"), ("y.json", b"{"), ("z.json", b"{}")]
        ),
        3,
        ", x.txt",
        "is not UTF-8",
        [],
    ),
    "a.txt": (
        "\n--\n".join([*GOOD[:9], "\0\0", *GOOD[9:]]).encode().replace(b"\0", b"\n\xff"),
        1,
        ":20",
        "is not UTF-8",
        ["--separator", r"\n--\n"],
    ),
}


def run(folder, *args) -> int:
    out = ["--output", str(folder / "out"), "--tokenizer", "bytes", "--holdout", "0"]
    return main(["prepare", "--input", str(folder / "in"), *out, *args])


@pytest.mark.parametrize("name", FILES)
def test_bad_rows_are_named_or_counted(name, tmp_path, capsys):
    content, count, place, reason, more = FILES[name]
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / name
    path.write_bytes(content)
    assert run(tmp_path, *more) == 2 and not (tmp_path / "out").exists()
    said = " ".join(capsys.readouterr().err.split())
    assert f"{place}': {reason}" in said and "leave out such rows: --on-bad-row skip" in said
    for stream in ([], ["--stream"]) if not name.endswith(".gz") else ([],):
        assert run(tmp_path, *more, *stream, "--on-bad-row", "skip", "--overwrite") == 0
        out, err = capsys.readouterr()
        meta = read_meta(tmp_path / "out")
        assert meta.splits["train"].num_documents == len(GOOD)
        assert meta.bad_rows == count
        assert meta.first_bad_row.startswith(f"{path}{place} {reason}")
        for said in (out, err):
            assert f"bad rows left out: {count}; the first: {path}{place} {reason}" in said
        assert main(["inspect", str(tmp_path / "out")]) == 0


def test_a_good_input_records_nothing(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(LINES))
    assert run(tmp_path, "--on-bad-row", "skip") == 0
    assert "bad" not in (tmp_path / "out" / "meta.json").read_text()


def test_a_text_file_is_left_out_whole(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"good\n")
    (tmp_path / "in" / "b.txt").write_bytes(b"begins well\n" * 200_000 + b"\xff\n")
    assert run(tmp_path) == 2
    assert "b.txt:200001': is not UTF-8" in capsys.readouterr().err
    assert run(tmp_path, "--on-bad-row", "skip") == 0
    assert read_meta(tmp_path / "out").splits["train"].num_documents == 1
    assert "b.txt:200001 is not UTF-8" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["prepare", "prepare-chat", "prepare-pairs"])
def test_only_bad_rows_are_an_error(command, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text("\n".join(BROKEN))
    args = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]
    assert main([command, *args, "--tokenizer", "bytes", "--on-bad-row", "skip"]) == 2
    said = capsys.readouterr().err
    assert f"has only bad rows, {len(BROKEN)}; the first: " in said and "in.jsonl:1" in said
    assert not (tmp_path / "out").exists()


def test_a_line_beyond_the_limit_is_left_out(tmp_path, monkeypatch):
    for module in ("json_file", "compressed"):
        monkeypatch.setattr(f"jaxpar.data.formats.{module}.MAX_LINE_BYTES", 1000)
    (tmp_path / "in").mkdir()
    long = json.dumps({"text": "x" * 5000})
    (tmp_path / "in" / "a.jsonl").write_text("\n".join([LINES[0], long, *LINES[1:]]))
    assert run(tmp_path) == 2
    assert run(tmp_path, "--on-bad-row", "skip") == 0
    meta = read_meta(tmp_path / "out")
    assert (meta.bad_rows, meta.splits["train"].num_documents) == (1, len(GOOD))
    assert meta.first_bad_row.endswith("a.jsonl:2 is longer than 1,000 bytes")


def says(role: str, text: str, **more) -> dict:
    return {"role": role, "content": text, **more}


TURNS = [says("user", "a"), says("assistant", "b")]

CHATS = [
    ({"messages": [*TURNS, says("tool", "c")]}, "message 3 has role 'tool'"),
    ({"messages": [says("user", "a"), says("assistant", None)]}, "content must be text, not None"),
    (
        {"messages": [says("user", "a"), says("assistant", "", tool_calls=[{"id": 1}])]},
        "message 2 has 'tool_calls', which no template writes",
    ),
    ({"messages": [*TURNS, says("assistant", "c", thinking="d")]}, "message 3 has 'thinking'"),
    ({"messages": TURNS, "tools": [{"name": "f"}]}, "has 'tools' beside its messages"),
    ({"messages": TURNS, "system": "Be brief."}, "has 'system' beside its messages"),
    ({"messages": [says("user", "a")]}, "has no message of the assistant"),
    ({"messages": [{"from": "human", "value": "a"}]}, "message 1 has role None"),
    ({"messages": [says("user", [{"type": "text", "text": "a"}]), TURNS[1]]}, "not list"),
    ({"conversations": TURNS}, "a list of messages in 'messages'"),
]


def test_conversations_that_no_template_writes(tmp_path, capsys):
    good = {"messages": [says("system", "Be brief."), *TURNS], "system": "Be brief. ", "id": 7}
    path, out = tmp_path / "in.jsonl", tmp_path / "out"
    args = ["--input", str(path), "--output", str(out), "--tokenizer", "bytes", "--holdout", "0"]
    for row, reason in CHATS:
        path.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
        assert main(["prepare-chat", *args]) == 2
        said = capsys.readouterr().err
        assert f"{path}:2" in said and reason in said and "--on-bad-row skip" in said
    path.write_text("".join(json.dumps(row) + "\n" for row, _ in [(good, ""), *CHATS]))
    assert main(["prepare-chat", *args, "--on-bad-row", "skip"]) == 0
    meta = read_meta(out)
    assert (meta.bad_rows, meta.splits["train"].num_documents) == (len(CHATS), 1)


def test_equal_responses_are_left_out(tmp_path, capsys):
    rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(9)]
    rows.insert(3, {"prompt": "a?", "chosen": "yes", "rejected": "yes"})
    path, out = tmp_path / "in.jsonl", tmp_path / "out"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ["--input", str(path), "--output", str(out), "--tokenizer", "bytes"]
    assert main(["prepare-pairs", *args]) == 2
    assert "in.jsonl:4': has two responses that are the same" in capsys.readouterr().err
    assert main(["prepare-pairs", *args, "--on-bad-row", "skip"]) == 0
    meta = read_meta(out)
    assert (meta.bad_rows, meta.first_bad_row) == (
        1,
        f"{path}:4 has two responses that are the same",
    )
    assert sum(split.num_documents for split in meta.splits.values()) == 18
    assert meta.splits["val"].num_documents  # of few, one prompt is held out
