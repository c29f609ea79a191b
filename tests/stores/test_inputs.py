"""Text in a store as input of `prepare`: the dataset of the same files on the disk."""

import gzip
import json
import pickle

import pyarrow
import pyarrow.parquet
import pytest

from jaxpar.data.formats.meta import read_meta
from jaxpar.data.prepare import remote
from tests.data.commands import main
from tests.stores.server import objects_at

LINES = "".join(json.dumps({"text": f"document {i} " * (i % 7)}) + "\n" for i in range(200))


@pytest.fixture
def folder(tmp_path):
    """Files of several kinds."""
    folder = tmp_path / "text"
    (folder / "web").mkdir(parents=True)
    (folder / "a.jsonl").write_text(LINES)
    (folder / "web/b.json.gz").write_bytes(
        gzip.compress(LINES.replace("document", "page").encode())
    )
    rows = pyarrow.table({"text": [f"row {i} of a table" for i in range(50)]})
    pyarrow.parquet.write_table(rows, folder / "web/c.parquet")
    (folder / "web/d.txt").write_text("a text " * 90)
    (folder / "readme.md").write_text("left out")
    return folder


@pytest.fixture
def prefix(folder, address, monkeypatch):
    """The same files below an address, read by 700 bytes."""
    monkeypatch.setattr(remote, "FETCHED", 700)
    place = address._replace(prefix="text")
    for file in folder.rglob("*.*"):
        objects_at(place).write(str(file.relative_to(folder)), file.read_bytes())
    yield place
    remote._objects.cache_clear()


def prepared(given, output, *options) -> str:
    args = ["prepare", "--input", str(given), "--output", str(output), "--holdout", "0.1"]
    assert main([*args, *options]) == 0
    return read_meta(output).fingerprint


@pytest.mark.parametrize(
    "options",
    [(), ("--tokenizer", "bpe:300"), ("--extension", "jsonl"), ("--parts", "3")],
)
def test_the_dataset_is_that_of_the_same_files_here(options, folder, prefix, tmp_path):
    here = prepared(folder, tmp_path / "here", *options)
    assert prepared(prefix, tmp_path / "there", *options) == here


@pytest.mark.parametrize("name", ["a.jsonl", "web/b.json.gz", "web/c.parquet", "web/d.txt"])
def test_one_object(name, folder, prefix, tmp_path):
    here = prepared(folder / name, tmp_path / "here")
    assert prepared(f"{prefix}/{name}", tmp_path / "there") == here


def test_the_processes_that_write_parts_are_sent_paths(prefix, folder):
    _, paths = remote.files_of(str(prefix))
    sent = pickle.loads(pickle.dumps(paths))
    assert sent == paths and [str(one) for one in sent] == [str(one) for one in paths]
    for one in sent:
        with one.open("rb") as file:
            name = str(one).removeprefix(f"{prefix}/")
            assert file.read() == (folder / name).read_bytes()


def test_errors_name_the_address(prefix, capsys, tmp_path):
    asked = ["prepare", "--output", str(tmp_path / "out"), "--input"]
    assert main([*asked, f"{prefix}/none"]) == 2
    assert f"--input = '{prefix}/none': has no objects" in capsys.readouterr().err
    objects_at(prefix).write("a.jsonl", b'{"text": "fine"}\n{"text": 3}\n')
    assert main([*asked, f"{prefix}/a.jsonl"]) == 2
    error = capsys.readouterr().err.strip()
    assert f"{prefix}/a.jsonl:2" in error and "\n" not in error
    assert main([*asked, str(prefix), "--stream"]) == 2
    assert "leave out --stream" in capsys.readouterr().err
