"""Opening a dataset: what is mapped, and that damage is noticed."""

import json
import os
import shutil

import jax
import numpy as np
import pytest

from jaxpar.config import Config, ConfigError, ParallelConfig, replace
from jaxpar.data.formats import arrays
from jaxpar.data.formats.inspect import inspect_tokens
from jaxpar.data.formats.meta import read_meta
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.loader import Loader
from jaxpar.data.options import InspectOptions
from jaxpar.data.sources import open_sources
from jaxpar.runtime import exit_codes
from jaxpar.sharding.mesh import make_mesh


@pytest.fixture
def copy(dataset, tmp_path):
    """A dataset that a test may damage."""
    return shutil.copytree(dataset, tmp_path / "copy")


@pytest.mark.parametrize("split", ["train", "val"])
def test_open(split, dataset):
    """Tokens are the file's, mapped read-only; sizes agree."""
    opened = TokenDataset.open(dataset, split)
    np.testing.assert_array_equal(opened.tokens, np.fromfile(dataset / f"{split}.bin", "<u2"))
    assert len(opened.tokens) == opened.num_tokens == opened.document_offsets[-1]
    assert len(opened.document_offsets) == opened.num_documents + 1
    ends = opened.tokens[opened.document_offsets[1:] - 1]
    assert (ends == 256).all() and np.sum(opened.tokens[:] == 256) == opened.num_documents
    expected = (opened.num_tokens - opened.num_documents) / opened.num_tokens
    assert opened.bytes_per_token == pytest.approx(expected)


@pytest.mark.parametrize("make", [False, True])
def test_no_dataset(make, tmp_path):
    """A missing folder and an empty one name the command that fills it."""
    folder = tmp_path / "nothing"
    if make:
        folder.mkdir()
    with pytest.raises(ConfigError, match="not a dataset" if make else "does not exist") as error:
        TokenDataset.open(folder)
    assert error.value.field == "data.path"
    assert f"python -m jaxpar.data prepare --input stdlib --output {folder}" in error.value.fix


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": "other", "version": 1}'])
def test_other_meta(content, copy):
    """A meta.json of something else."""
    (copy / "meta.json").write_text(content)
    with pytest.raises(ConfigError, match=r"is not the meta\.json of a version 2 dataset"):
        TokenDataset.open(copy)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", "257"),
        ("vocab_size", True),
        ("dtype", "uint12"),
        ("eos_token", None),
        ("num_tokens", "9"),
        ("num_tokens", -1),
        ("num_documents", 10**12),
        ("num_bytes", -1),
        ("sha256", "0"),
        ("documents_sha256", "x" * 64),
        ("vocab_size", -1),
        ("vocab_size", 0),
        ("vocab_size", 2**31),
        ("vocab_size", 2**16 + 1),
        ("eos_id", -1),
        ("eos_id", 257),
        ("tokenizer", "pickle"),
        ("tokenizer_fingerprint", ""),
        ("unigram_entropy", -0.5),
        ("unigram_entropy", 1e9),
        ("inputs", (1,)),
        ("holdout", 1.0),
        ("test", 0.1),
    ],
)
def test_values_of_another_type(name, value, copy):
    """What somebody has written into meta.json by hand."""
    values = json.loads((copy / "meta.json").read_text())
    (part,) = values["splits"]["val"]["parts"]
    (part if name in part else values)[name] = value
    (copy / "meta.json").write_text(json.dumps(values))
    told = "documents have" if value == 10**12 else name
    with pytest.raises(ConfigError, match=rf"is not the meta\.json of .*\b{told}\b"):
        TokenDataset.open(copy)


@pytest.mark.parametrize(("number", "kind"), [(13, ConfigError), (116, exit_codes.RunError)])
def test_tokens_that_cannot_be_read(number, kind, copy, monkeypatch):
    """Missing rights are refused; what may pass, as a stale NFS handle, may be tried again."""

    def fail(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(arrays, "_Opened", fail)
    cfg = replace(Config(), **{"data.path": str(copy)})
    said = rf"data\.path.*train\.bin cannot be read: {os.strerror(number)}"
    with pytest.raises(kind, match=said):
        open_sources(cfg, "train")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested deeper than"),
        ('{"vocab_size": Infinity}', "has Infinity"),
        ('{"vocab_size": 1%s}' % ("0" * 10_000), "more than 64 bits"),
        ('{"inputs": ["\\ud800"]}', "half a surrogate"),
    ],
)
def test_json_beyond_the_limits(text, said, copy):
    (copy / "meta.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"is not the meta\.json of .*{said}"):
        TokenDataset.open(copy)


@pytest.mark.parametrize("at", [6, 8, 10, 20, 60])
def test_offsets_with_a_damaged_header(at, copy):
    """NumPy raises a TokenError for some, which is none of its documented errors."""
    path = copy / "train.documents.npy"
    data = bytearray(path.read_bytes())
    data[at : at + 3] = b"\0'\xff"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"train\.documents\.npy"):
        TokenDataset.open(copy)


def test_later_version(copy):
    """A dataset from the future is not guessed at."""
    values = json.loads((copy / "meta.json").read_text())
    (copy / "meta.json").write_text(json.dumps(values | {"version": 3}))
    with pytest.raises(ConfigError, match="version 3, and this jaxpar reads 2"):
        TokenDataset.open(copy)


@pytest.mark.parametrize("change", [-2, 2])
def test_wrong_size(change, copy):
    """A truncated copy, or a longer one: the file and both sizes."""
    path = copy / "train.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:change] if change < 0 else whole + bytes(change))
    with pytest.raises(ConfigError) as error:
        TokenDataset.open(copy)
    assert str(path) in error.value.rule
    assert f"has {len(whole) + change:,} bytes" in error.value.rule
    assert f"records {len(whole):,} bytes" in error.value.rule
    TokenDataset.open(copy, "val")  # The other split is whole.


def test_missing_tokens(copy):
    """No token file at all."""
    (copy / "train.bin").unlink()
    with pytest.raises(ConfigError, match=r"train\.bin is missing"):
        TokenDataset.open(copy)


@pytest.mark.parametrize("damage", ["missing", "cut", "shorter", "type", "range"])
def test_damaged_offsets(damage, copy):
    """Document offsets that cannot be those of the tokens."""
    path = copy / "train.documents.npy"
    offsets = np.load(path)
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    else:
        changed = {"shorter": offsets[1:], "type": offsets.astype(np.int32), "range": offsets + 1}
        np.save(path, changed[damage])
    with pytest.raises(ConfigError, match=r"train\.documents\.npy"):
        TokenDataset.open(copy)


@pytest.mark.parametrize("offset", [10**9, -5])
def test_documents_that_end_before_they_begin(offset, copy):
    """An inner offset that no token has."""
    path = copy / "train.documents.npy"
    offsets = np.load(path)
    offsets[2] = offset
    np.save(path, offsets)
    values = {"data.path": str(copy), "data.seq_len": 16, "train.global_batch_size": 8}
    loader = Loader(replace(Config(), **values), make_mesh(ParallelConfig(), jax.devices()[:1]))
    with pytest.raises(ConfigError, match=r"train\.documents\.npy is not in order at document \d"):
        for _ in loader.once(loader.first_sequences(10**6)):
            pass


def test_documents_are_part_of_the_identity_and_inspected(copy):
    values = json.loads((copy / "meta.json").read_text())
    (part,) = values["splits"]["train"]["parts"]
    before, part["documents_hash"] = part["documents_hash"], "0" * 16
    known = read_meta(copy).fingerprint
    (copy / "meta.json").write_text(json.dumps(values))
    assert read_meta(copy).fingerprint != known
    with pytest.raises(ConfigError, match=r"train\.documents\.npy has the hash of a stream"):
        inspect_tokens(InspectOptions(path=str(copy)))
    part["documents_hash"] = before
    (copy / "meta.json").write_text(json.dumps(values))
    path = copy / "train.documents.npy"
    offsets = np.load(path)
    offsets[1] += 1
    np.save(path, offsets)
    with pytest.raises(ConfigError, match=r"train\.documents\.npy has sha256"):
        inspect_tokens(InspectOptions(path=str(copy)))
    del part["documents_sha256"]
    (copy / "meta.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"not the meta\.json .*documents_sha256.*prepare it"):
        read_meta(copy)


def test_unknown_split(dataset):
    """A programmer's mistake."""
    with pytest.raises(ValueError, match="not one of train, val, test"):
        TokenDataset.open(dataset, "dev")
