"""Files of text with random damage: prepared, or one clear error. Never a traceback."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import random
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpar.data.formats.meta import read_meta
from tests.data.commands import main

ROWS = [{"text": f"text {i} naïve\r\n", "n": [i, {"a": None}]} for i in range(12)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def _table(write) -> bytes:
    out = io.BytesIO()
    write(pa.table({"text": [row["text"] for row in ROWS]}), out)
    return out.getvalue()


def _arrow(table: pa.Table, out: io.BytesIO) -> None:
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def _tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for i, row in enumerate(ROWS):
            content = json.dumps(row).encode()
            about = tarfile.TarInfo(f"{i}.json" if i % 2 else f"{i}.txt")
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return out.getvalue()


FILES = {
    "a.jsonl": LINES,
    "b.json": json.dumps(ROWS).encode(),
    "c.json": json.dumps(ROWS, indent=1).encode(),
    "d.json": "\n".join(json.dumps(row, indent=1) for row in ROWS).encode(),
    "e.json.gz": gzip.compress(LINES, mtime=0),
    "f.jsonl.zst": pa.compress(LINES, "zstd", asbytes=True),
    "g.jsonl.xz": lzma.compress(LINES),
    "h.txt.bz2": bz2.compress(LINES),
    "i.txt": LINES,
    "j.parquet": _table(pq.write_table),
    "k.arrow": _table(_arrow),
    "l.tar": _tar(),
}

#: Bytes that mean something in these formats.
MARKS = [b"\0", b"\xff", b"\n", b"{", b"[", b"]", b",", b'"', b"\\ud800", b"null", b"\xef\xbb\xbf"]


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Change, insert, repeat, move or cut a few bytes."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        end = min(end, at + rng.choice((1, 4, 200)))
        part = rng.choice(MARKS) * rng.choice((1, 1, 3, 100))
        content = rng.choice(
            (
                content[:at],
                content[:at] + part + content[at:],
                content[:at] + part + content[end:],
                content[:at] + content[end:],
                content[:end] + content[at:end] + content[end:],
                content[end:] + content[:at],
                content[:at] + rng.randbytes(end - at) + content[end:],
            )
        )
    return content


def check_one(folder, name: str, content: bytes, more: list[str], capsys) -> int:
    """Prepare a damaged file. Returns: the exit code."""
    path, out = folder / name, folder / "out"
    path.write_bytes(content)
    args = ["--input", str(path), "--output", str(out), "--tokenizer", "bytes", "--workers", "1"]
    code = main(["prepare", *args, "--overwrite", *more])
    said = capsys.readouterr().err
    errors = said[said.find("config error:") :].strip().split("\n") if code else []
    assert code in (0, 2) and len(errors) <= 4 and all(len(line) < 2000 for line in errors)
    assert not code or errors[0].startswith("config error: --")
    if code == 0:
        splits = read_meta(out).splits.values()
        assert all(split.num_documents >= 1 for split in splits)
    assert not list(folder.glob("*.partial"))
    return code


def run(folder, capsys, count: int, seed: int) -> list[int]:
    rng, codes = random.Random(seed), []
    for name in itertools.islice(itertools.cycle(FILES), count):
        more = rng.choice(([], ["--on-bad-row", "skip"], ["--stream"]))
        codes.append(check_one(folder, name, damaged(FILES[name], rng), more, capsys))
        (folder / name).unlink()
    return codes


def test_damage_is_an_error_or_a_text(tmp_path, capsys):
    assert set(run(tmp_path, capsys, 36, 1)) == {0, 2}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_more_damage(seed, tmp_path, capsys):
    run(tmp_path, capsys, 600, seed)


@pytest.mark.parametrize("name", FILES)
def test_whole_files_are_read(name, tmp_path, capsys):
    assert check_one(tmp_path, name, FILES[name], [], capsys) == 0
    documents = 1 if ".txt" in name else len(ROWS)
    splits = read_meta(tmp_path / "out").splits
    if documents == 1:
        assert [split.num_documents for split in splits.values()] == [1, 1]  # cut in two
    else:
        assert sum(split.num_documents for split in splits.values()) == documents
    # Every beginning of a file is an error, or whole rows.
    for end in range(0, len(FILES[name]), max(len(FILES[name]) // 4, 1)):
        check_one(tmp_path, name, FILES[name][:end], [], capsys)
