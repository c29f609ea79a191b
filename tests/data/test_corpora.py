"""Files and folders as corpora are published: all documents are read, or the rest is named."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import re
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpar.data.formats.meta import read_meta
from tests.data.commands import main

TEXTS = [f"document number {i}, naïve 日本" for i in range(40)]


def lines(texts=TEXTS, **more) -> bytes:
    """JSON Lines with other fields, as crawls have them."""
    rows = ({"url": f"https://example.org/{i}", "text": t, **more} for i, t in enumerate(texts))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def zstd(data: bytes) -> bytes:
    return pa.compress(data, "zstd", asbytes=True)


def parquet(texts=TEXTS) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": texts, "id": range(len(texts))}), out, row_group_size=7)
    return out.getvalue()


def array(indent: int | None) -> bytes:
    rows = [{"text": text, "meta": {"list": [1, {"}": "]"}]}} for text in TEXTS]
    return json.dumps(rows, indent=indent).encode()


def tar(**members: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members.items():
            about = tarfile.TarInfo(name.replace("_", "."))
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return out.getvalue()


INFO = json.dumps({"default": {"splits": ["train"], "size": 3}}, indent=2).encode()

#: Folders as published, or files: their content, documents, and what is said of other files.
READ = {
    "C4": ({"en/c4-train.00000-of-01024.json.gz": gzip.compress(lines())}, 40, None),
    "Dolma": (
        {
            "data/books-0000.json.gz": gzip.compress(lines(added="2023", source="gutenberg")),
            "urls/v1_7.txt": b"https://example.org/a\nhttps://example.org/b\n",
            "scripts/.gitkeep": b"",
            "README.md": b"# Dolma",
        },
        41,  # the list of addresses is a text
        "files to read: 1 .json.gz .*, 1 .txt .*files not read: 1 .md .7 bytes",
    ),
    "peS2o": ({"data/v2/train-00000-of-00020.json.gz": gzip.compress(lines())}, 40, None),
    "RedPajama": (
        {
            "documents/2023-06/0000/en_head.json.gz": gzip.compress(lines()),
            "listings/en-head.txt": b"2023-06/0000/en_head",
        },
        41,
        "files to read",
    ),
    "The Pile": ({"train/00.jsonl.zst": zstd(lines(meta={"pile_set_name": "Books3"}))}, 40, None),
    "Nemotron": ({"part.00000.jsonl.zstd": zstd(lines())}, 40, None),
    "Megatron": ({"my-corpus.json": lines(src="www.example.org", type="Eng")}, 40, None),
    "FineWeb": ({"data/CC-MAIN/000_00000.parquet": parquet(), ".git/config": b"x"}, 40, "hidden"),
    "a dataset card": ({"data.jsonl": lines(), "dataset_infos.json": INFO}, 40, "json without 'te"),
    "xz": ({"a.json.xz": lzma.compress(lines())}, 40, None),
    "bzip2": ({"a.jsonl.bz2": bz2.compress(lines())}, 40, None),
    "ndjson": ({"a.NDJSON": lines()}, 40, None),
    "texts": ({"a.txt.gz": gzip.compress(b"one"), "b.txt.xz": lzma.compress(b"two")}, 2, "2"),
    "an array": ({"a.json": array(None)}, 40, None),
    "an indented array": ({"a.json": array(2)}, 40, None),
    "a compressed array": ({"a.json.gz": gzip.compress(array(1))}, 40, None),
    "an object per file": (
        {f"{i}.json": json.dumps({"text": t}, indent=2).encode() for i, t in enumerate(TEXTS)},
        40,
        None,
    ),
    "indented objects": (
        {"a.json": b"\n".join(json.dumps({"text": t}, indent=2).encode() for t in TEXTS)},
        40,
        None,
    ),
    "a mark of UTF-8": ({"a.jsonl": b"\xef\xbb\xbf" + lines()}, 40, None),
    "no last newline": ({"a.jsonl": lines().rstrip()}, 40, None),
    "tar": ({"a.tar": tar(a_txt=b"one", a_json=b"{}", b_json=b'{"text": "two"}')}, 2, "1 .json"),
}


def folder(tmp_path: Path, files: dict[str, bytes]) -> Path:
    """Write a folder named in, as it was published."""
    for name, content in files.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "in"


def prepare(*args: str | Path) -> int:
    return main(["prepare", "--tokenizer", "bytes", "--overwrite", *map(str, args)])


def documents(output: Path) -> int:
    return sum(split.num_documents for split in read_meta(output).splits.values())


@pytest.mark.parametrize(("files", "count", "said"), READ.values(), ids=READ)
def test_all_documents_are_read(files, count, said, tmp_path, capsys):
    source, out = folder(tmp_path, files), tmp_path / "out"
    assert prepare("--input", source, "--output", out) == 0
    assert documents(out) == count
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(said, told) if said else "not read" not in told
    path = source / max(files, key=lambda name: len(files[name]))
    assert prepare("--input", path, "--output", out) == 0  # named, not in a folder


@pytest.mark.parametrize(
    "name", ["The Pile", "Nemotron", "an array", "indented objects", "a mark of UTF-8", "tar"]
)
def test_the_same_is_streamed(name, tmp_path):
    """From the places in the index, the same tokens are read again."""
    source = folder(tmp_path, READ[name][0])
    assert prepare("--input", source, "--output", tmp_path / "out") == 0
    assert prepare("--input", source, "--output", tmp_path / "stream", "--stream") == 0
    assert main(["inspect", str(tmp_path / "stream")]) == 0  # tokenizes all, and compares hashes
    assert read_meta(tmp_path / "stream") == read_meta(tmp_path / "out")


#: Folders of which most is not read: what is refused, and the documents after each fix.
REFUSED = {
    "notes": (
        {"a.txt": b"one", "b.md": b"x" * 99, "c.png": b"\x89\0" * 9},
        r"1 \.md \(99 bytes\), 1 \.png \(18 bytes\), and only 1 that are, 3 bytes",
        [2, 1],
    ),
    "another compression": (
        {"a.txt": b"one", "data/b.json.lz4": b'\4"M\xff' * 99},
        r"1 \.lz4 \(396 bytes\)",
        [1],
    ),
    "nothing else": ({"a.md": b"one", "b.rst": b"two"}, "has no .txt, .*but 1 .md", [2]),
}


@pytest.mark.parametrize(("files", "rule", "fixed"), REFUSED.values(), ids=REFUSED)
def test_most_is_not_left_out(files, rule, fixed, tmp_path, capsys):
    source, out = folder(tmp_path, files), tmp_path / "out"
    assert prepare("--input", source, "--output", out) == 2 and not out.exists()
    said = capsys.readouterr().err
    assert re.search(rule, said)
    fixes = re.findall(r"--extension((?: \.\w+)+)", said)
    assert len(fixes) == len(fixed)
    for fix, count in zip(fixes, fixed, strict=True):
        args = ["--extension", *fix.split()]
        assert prepare("--input", source, "--output", out, *args, "--holdout", "0") == 0
        assert documents(out) == count
        assert "files not read" in capsys.readouterr().err or count == len(files)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("corpus.dat", lines()),
        ("corpus.gz", gzip.compress(lines())),
        ("corpus", lines()),
        ("corpus.txt_", array(2)),
        ("corpus.log", array(None)),
    ],
)
def test_json_of_another_name_is_renamed(name, content, tmp_path, capsys):
    """It is never read as raw text, and the fix in the error works."""
    path, out = folder(tmp_path, {name: content}) / name, tmp_path / "out"
    assert prepare("--input", path, "--output", out) == 2
    said = capsys.readouterr().err
    assert "--extension" not in said
    subprocess.run(shlex.split(re.search(r"rename it: (mv .*)\.$", said)[1]), check=True)
    assert prepare("--input", path.parent, "--output", out) == 0
    assert documents(out) == 40
    for ending in (".json", ".jsonl", ".gz"):  # also if asked for
        assert prepare("--input", path.parent, "--output", out, "--extension", ending) in (0, 2)
        assert documents(out) == 40


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "table.csv", "a.pdf"])
def test_archives_and_tables_are_not_text(name, tmp_path, capsys):
    path = folder(tmp_path, {name: b"a,b\n1,2\n" if name == "table.csv" else b"\x1f\x8b\0"}) / name
    for given in (path, path.parent):
        assert prepare("--input", given, "--output", tmp_path / "out") == 2
        assert "--extension" not in capsys.readouterr().err


def test_members_of_tar_files_are_counted(tmp_path, capsys):
    pictures = tar(a_jpg=b"\xff" * 5050, a_txt=b"a cat", b_jpg=b"\xff" * 50, b_txt=b"a dog")
    source, out = folder(tmp_path, {"a.tar": pictures}), tmp_path / "out"
    assert prepare("--input", source, "--output", out) == 2
    said = capsys.readouterr().err
    assert "has 10 bytes of text, and members that are not read: 2 .jpg (5.1 kB)" in said
    assert "--extension .tar" in said
    assert prepare("--input", source, "--output", out, "--extension", ".tar") == 0
    assert documents(out) == 2
    assert "a.tar: members not read: 2 .jpg (5.1 kB)" in capsys.readouterr().err


def test_folders_of_conversations_say_what_they_leave_out(tmp_path, capsys):
    says = lambda role, text: {"role": role, "content": text}  # noqa: E731
    chat = {"messages": [says("user", "a"), says("assistant", "b")]}
    files = {"a.json.gz": gzip.compress(json.dumps(chat).encode() * 1 + b"\n"), "LICENSE": b"MIT"}
    source, out = folder(tmp_path, files), tmp_path / "out"
    args = ["--output", str(out), "--tokenizer", "bytes", "--holdout", "0", "--overwrite"]
    assert main(["prepare-chat", "--input", str(source), *args]) == 0
    assert "1 without an ending (3 bytes)" in capsys.readouterr().err
    (source / "b.parquet").write_bytes(parquet())
    assert main(["prepare-chat", "--input", str(source), *args]) == 2
    named = re.search(r"name the files to read: --input (\S+)\.", capsys.readouterr().err)[1]
    found = [str(path) for path in source.glob(named.removeprefix(f"{source}/"))]
    assert main(["prepare-chat", "--input", *found, *args]) == 0
    assert main(["prepare-chat", "--input", str(source / "b.parquet"), *args]) == 2
    assert "is not one of .jsonl, .json, .ndjson" in capsys.readouterr().err


def test_reframe_reads_what_prepare_reads(tmp_path, capsys):
    files = {"a.json.gz": gzip.compress(lines()), "b.json": array(2), "c.parquet": parquet()}
    files |= {"notes.md": b"notes"}
    source, frames, out = folder(tmp_path, files), tmp_path / "frames", tmp_path / "out"
    assert main(["reframe", "--input", str(source), "--output", str(frames)]) == 0
    assert "files not read: 1 .md (5 bytes)" in capsys.readouterr().err
    assert sorted(path.name for path in frames.iterdir()) == [f"{n}.jsonl.zst" for n in "abc"]
    assert prepare("--input", frames, "--output", out, "--stream") == 0
    assert documents(out) == 120


def long_window(content: bytes) -> bytes:
    """A frame of Zstandard, in a stored block, whose header asks for a window of 2 GiB."""
    block = (len(content) << 3 | 1).to_bytes(3, "little")
    return (0xFD2FB528).to_bytes(4, "little") + bytes([0, 21 << 3]) + block + content


def test_a_long_window_of_zstd_is_the_reason(tmp_path, capsys):
    path, out = folder(tmp_path, {"a b.jsonl.zst": long_window(lines())}) / "a b.jsonl.zst", "out"
    for more in ([], ["--stream"]):
        assert prepare("--input", path, "--output", tmp_path / out, *more) == 2
        said = capsys.readouterr().err
        assert "is compressed with a zstd window above 128 MiB" in said
    command = re.search(r"compress it again: (.*)\.$", said)[1]
    if shutil.which("zstd") is None:
        pytest.skip("the fix needs the program zstd")
    subprocess.run(command, shell=True, check=True)
    again = path.with_name("a b-again.jsonl.zst")
    assert prepare("--input", again, "--output", tmp_path / out) == 0
    assert documents(tmp_path / out) == 40


def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys, monkeypatch):
    source = folder(tmp_path, {"sub/a.jsonl": lines()})

    @contextlib.contextmanager
    def denied(method, name):
        original = getattr(Path, method)

        def fail(path, *args, **kwargs):
            if path.name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return original(path, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Path, method, fail)
            yield

    for method, name in (("iterdir", "sub"), ("open", "a.jsonl")):
        with denied(method, name):
            assert prepare("--input", source, "--output", tmp_path / "out") == 2
        said = capsys.readouterr().err
        assert f"{name}': cannot be read: Permission denied. Fix: check the file" in said
