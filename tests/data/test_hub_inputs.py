"""Datasets of the Hugging Face Hub as inputs of `prepare`, from a server on this host."""

import io
import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from jaxpar.data.formats.meta import read_meta
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.tokenizer import load_tokenizer
from tests.data.commands import main
from tests.hub import COMMIT, connect, serving

NOWHERE = "http://127.0.0.1:9"


def parquet(*texts: str) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": list(texts)}), file)
    return file.getvalue()


FILES = {
    ".gitattributes": b"*.parquet filter=lfs",
    "README.md": b"---\nconfigs: []\n---\n",
    "data/train-00000-of-00002.parquet": parquet("first", "second"),
    "data/train-00001-of-00002.parquet": parquet("third"),
    "data/validation-00000-of-00001.parquet": parquet("held out"),
    "sample/10BT/000.jsonl": json.dumps({"text": "a sample"}).encode(),
}

CARD = {
    "configs": [
        {
            "config_name": "default",
            "data_files": [
                {"split": "train", "path": "data/train-*"},
                {"split": "validation", "path": ["data/validation-*"]},
            ],
        },
        {"config_name": "sample-10BT", "data_files": [{"split": "train", "path": "sample/10BT/*"}]},
    ]
}


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with serving(FILES) as server:
        server.card = CARD
        connect(monkeypatch, server.url, tmp_path / "cache")
        yield server


def texts(name: str) -> list[str]:
    """Prepare a dataset. Returns:  its documents."""
    args = ["prepare", "--output", "out", "--holdout", "0", "--overwrite", "--input", name]
    assert main(args) == 0
    text = load_tokenizer("out").decode(TokenDataset.open("out").tokens[:])
    return text.removesuffix("<|endoftext|>").split("<|endoftext|>")


@pytest.mark.parametrize("card", [CARD, {}])
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (":train", ["first", "second", "third"]),
        (":validation", ["held out"]),
        (":sample/10BT", ["a sample"]),
        ("@v1:data", ["first", "second", "third", "held out"]),
    ],
)
def test_a_split_or_a_folder(more, expected, card, server):
    server.card = card
    expected = expected if card or more != ":train" else [*expected, "a sample"]
    assert texts(f"hf:org/data{more}") == expected
    assert read_meta("out").inputs == (f"hf:org/data{more}",)
    read = {request for request in server.requests if "/resolve/" in request}
    assert read and all(f"/{COMMIT}/" in request for request in read)


def test_a_dataset_without_a_split_is_its_training_data(server, capsys):
    assert texts("hf:org/data") == ["first", "second", "third"]
    assert texts("hf:org/data:sample-10BT") == ["a sample"]
    one, other = CARD["configs"][1], {"config_name": "other", "data_files": "data/train*"}
    server.card = {"configs": [one, other]}
    assert texts("hf:org/data:other") == ["first", "second", "third"]
    assert main(["prepare", "--output", "o", "--input", "hf:org/data"]) == 2
    fix = "use hf:org/data:other, or one of other, other/train, sample-10BT, sample-10BT/train"
    assert f"has no split 'train'. Fix: {fix}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "hf:org/data:nothing",
            "has no split 'nothing'. Fix: use hf:org/data:default, or one",
        ),
        ("hf:org/other", "the dataset org/other does not exist, or is private"),
        ("hf:org/data@v2", "has no revision 'v2'"),
        ("hf:org", "must be hf:ORG/NAME"),
    ],
)
def test_what_is_not_there_is_one_line(name, why, server, capsys):
    assert main(["prepare", "--output", "out", "--input", name]) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(why, error) and f"--input = '{name}'" in error and "\n" not in error


def test_without_a_network_it_is_one_line(server, monkeypatch, tmp_path, capsys):
    connect(monkeypatch, NOWHERE, tmp_path / "cache")
    assert main(["prepare", "--output", "out", "--input", "hf:org/data:train"]) == 2
    error = capsys.readouterr().err.strip()
    assert "the dataset org/data cannot be reached" in error and "\n" not in error
    assert "run `hf download org/data --repo-type dataset --local-dir DIR`" in error


def test_an_index_needs_its_text_on_this_host(server, capsys):
    assert main(["prepare", "--output", "out", "--stream", "--input", "hf:org/data:train"]) == 2
    assert "leave out --stream" in capsys.readouterr().err
