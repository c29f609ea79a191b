"""Damaged, mislabeled and impossible tokens: each is one error that names file and place."""

import io
import json
import re
import shutil
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxpar.commands import call
from jaxpar.config import Config, ConfigError, ParallelConfig, Source, replace
from jaxpar.data.formats.token_file import Hints
from jaxpar.data.loader import Loader
from jaxpar.data.sources import open_tokens
from jaxpar.sharding.mesh import make_mesh
from tests.data.commands import main

GOLDENS = Path(__file__).parent / "goldens"

TOKENS = np.arange(1, 41, dtype="<u2")

MDS_ROWS = [np.array([1, 2, 3], "<i4"), np.array([4, 5], "<i4")]

#: Offsets in an index of 4 sequences of 10 tokens, one a document.
LENGTHS, POINTERS, DOCUMENTS = 34, 34 + 16, 34 + 48


def index(code: int = 8, version: int = 1, sequences: int = 4, indices: int = 5) -> bytearray:
    """An index of TOKENS."""
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, sequences, indices)
    lengths = np.full(sequences, 10, "<i4").tobytes()
    pointers = np.arange(0, 20 * sequences, 20, dtype="<i8").tobytes()
    return bytearray(head + lengths + pointers + np.arange(indices, dtype="<i8").tobytes())


def changed(at: int, value: bytes) -> bytes:
    """An index with some bytes replaced."""
    data = index()
    data[at : at + len(value)] = value
    return bytes(data)


def llmc(magic: int = 20240520, version: int = 1, count: int = 40) -> bytes:
    """TOKENS under a header of llm.c's."""
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, count
    return head.tobytes() + TOKENS.tobytes()


def i64(value: int) -> bytes:
    return struct.pack("<q", value)


def npy(array: np.ndarray) -> bytes:
    """A file of NumPy's."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def table(rows: int = 9, **columns) -> bytes:
    """The first rows of a Parquet file."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns)[:rows], file)
    return file.getvalue()


def tar(members: dict[str, bytes]) -> bytes:
    """A tar file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


#: A shard of two samples of ndarray:int32 tokens: [1, 2, 3] and [4, 5].
MDS = b"".join(
    [
        struct.pack("<4I", 2, 18, 36, 50),  # samples; where they start; the end
        b"{}",
        *(struct.pack("<IBB", 2 + 4 * len(x), 4, len(x)) + x.tobytes() for x in MDS_ROWS),
    ]
)


def mds(name: str = "shard.00000.mds", samples: int = 2, encoding: str = "ndarray:int32") -> bytes:
    """The index of MDS."""
    shard = {"version": 2, "format": "mds", "samples": samples, "compression": None}
    shard |= {"column_names": ["tokens"], "column_encodings": [encoding], "column_sizes": [None]}
    shard |= {"raw_data": {"basename": name, "bytes": len(MDS), "hashes": {}}, "zip_data": None}
    return json.dumps({"version": 2, "shards": [shard]}).encode()


#: The index of TOKENS in a .ds file, and what is wrong if it is not theirs.
ENDS = i64(25) + i64(40)
DS_BYTES = r"x\.ds\.index, byte \d+: documents end at token 4[01], but .*x\.ds has [78]\d bytes"


#: Files, the one that data.path names, and what the error must say.
BAD: dict[str, tuple[dict[str, bytes], str, str]] = {
    "index: magic": ({"x.idx": b"X" * 200}, "x", r"x\.idx, byte 0: starts with b'XXX"),
    "index: version": ({"x.idx": bytes(index(version=2))}, "x", "byte 9: has version 2, not 1"),
    "index: dtype": ({"x.idx": bytes(index(code=9))}, "x", "byte 17: has dtype code 9"),
    "index: floats": ({"x.idx": bytes(index(code=7))}, "x", "byte 17: has dtype code 7"),
    "index: cut header": ({"x.idx": bytes(index())[:20]}, "x", "byte 20: ends inside its header"),
    "index: empty file": ({"x.idx": b""}, "x", "byte 0: ends inside its header"),
    "index: cut": ({"x.idx": bytes(index())[:-8]}, "x", "has 114 bytes, but its header requires"),
    "index: nothing": (
        {"x.idx": bytes(index(sequences=0, indices=1))},
        "x",
        "0 sequences and 1 indices: empty",
    ),
    "index: no tokens": (
        {"x.idx": changed(LENGTHS, bytes(POINTERS - LENGTHS))},
        "x",
        "has only empty sequences",
    ),
    "index: negative length": (
        {"x.idx": changed(LENGTHS + 4, struct.pack("<i", -10))},
        "x",
        f"byte {LENGTHS + 4}: sequence 1 has -10 tokens",
    ),
    "index: pointer past the end": (
        {"x.idx": changed(POINTERS + 24, i64(9_000))},
        "x",
        f"byte {POINTERS + 24}: sequence 3 starts at byte 9,000, not at the end of the one",
    ),
    "index: first document": (
        {"x.idx": changed(DOCUMENTS, i64(1))},
        "x",
        f"byte {DOCUMENTS}: the first document starts at sequence 1",
    ),
    "index: documents out of order": (
        {"x.idx": changed(DOCUMENTS + 8, i64(3))},
        "x",
        f"byte {DOCUMENTS + 16}: document 2 starts at sequence 2, before the one before it",
    ),
    "index: document past the end": (
        {"x.idx": changed(DOCUMENTS + 32, i64(7))},
        "x",
        "documents end at sequence 7, but there are 4",
    ),
    "pair: tokens cut": (
        {"x.idx": bytes(index()), "x.bin": TOKENS[:-3].tobytes()},
        "x.idx",
        r"x\.bin ends at byte 74, but .*x\.idx records 80 bytes",
    ),
    "pair: no tokens": ({"x.idx": bytes(index())}, "x", r"x\.bin is missing"),
    "pair: no index": (
        {"x_text_document.bin": TOKENS.tobytes()},
        "x_text_document.bin",
        r"its \.idx file is missing",
    ),
    "pair: negative token": (
        {"x.idx": bytes(index(code=3)), "x.bin": np.array([7] * 39 + [-2], "<i2").tobytes()},
        "x",
        r"token 39 of .*x\.bin \(byte 78\) is -2",
    ),
    "llm.c: magic": ({"x.bin": llmc(20240326)}, "x.bin", "byte 0: starts with 20240326"),
    "llm.c: version": ({"x.bin": llmc(version=7)}, "x.bin", "byte 4: has version 7"),
    "llm.c: llama version": ({"x.bin": llmc(20240801)}, "x.bin", "has version 1 of llm.c's format"),
    "llm.c: count": ({"x.bin": llmc(count=-1)}, "x.bin", "byte 8: records -1 tokens"),
    "llm.c: no tokens": ({"x.bin": llmc(count=0)}, "x.bin", "byte 8: records 0 tokens"),
    "llm.c: cut": ({"x.bin": llmc()[:-6]}, "x.bin", r"byte 1,098: has 1,098 bytes, .* 40 tokens"),
    "llm.c: too long": ({"x.bin": llmc() + b"\0\0"}, "x.bin", "byte 1,104: has 1,106 bytes"),
    "llm.c: cut header": ({"x.bin": llmc()[:100]}, "x.bin", "byte 100: ends inside llm.c's header"),
    "nanoGPT: empty": ({"x.bin": b""}, "x.bin", "byte 0: is empty"),
    "nanoGPT: half a token": ({"x.bin": TOKENS.tobytes()[:-1]}, "x.bin", "byte 78: has 79 bytes"),
    "nanoGPT: 32 bits": (
        {"x.bin": TOKENS.astype("<u4").tobytes()},
        "x.bin",
        "every second 16-bit number .* is 0",
    ),
    "nanoGPT: 32 bits, of a large vocabulary": (
        {"x.bin": (np.arange(1, 200, dtype="<u4") * 1300).tobytes()},
        "x.bin",
        "every second 16-bit number .* is at most 3: it has 32-bit tokens",
    ),
    "text": ({"x.jsonl": b"{}"}, "x.jsonl", "is text, not tokens"),
    "another kind": ({"x.xyz": b"{}"}, "x.xyz", "is not a token file"),
    "a lone index": ({"train.documents.npy": b""}, ".", "is not a dataset folder"),
    "a folder of text": ({"x.jsonl": b"{}"}, ".", "is text, not tokens"),
    "two formats": (
        {"x_1.bin": llmc(), "x_2.bin": TOKENS.tobytes()},
        ".",
        r"has tokens of several formats: llm\.c, nanoGPT",
    ),
    "only held out": ({"x_val_1.bin": llmc(), "y_val.bin": llmc()}, ".", "has no train split"),
    "a pattern": ({"x.bin": llmc()}, "y_*.bin", "matches no token files"),
    "a prepared dataset below": (
        {"a/meta.json": b"{}", "x.bin": llmc()},
        ".",
        "has the dataset a",
    ),
    ".ds: cut": ({"x.ds": TOKENS.tobytes()[:-2], "x.ds.index": ENDS}, "x.ds", DS_BYTES),
    ".ds: index beyond": ({"x.ds": TOKENS.tobytes(), "x.ds.index": i64(41)}, "x.ds", DS_BYTES),
    ".ds: index cut": (
        {"x.ds": TOKENS.tobytes(), "x.ds.index": ENDS[:-3]},
        "x.ds",
        r"x\.ds\.index, byte 8: ends inside a number",
    ),
    ".ds: negative size": (
        {"x.ds": TOKENS.tobytes(), "x.ds.index": i64(-4) + i64(40)},
        "x.ds",
        r"byte 0: document 0 ends at token -4, but starts at 0",
    ),
    ".ds: metadata": (
        {"x.ds": TOKENS.tobytes(), "x.ds.metadata": b"gpt2|4\n40\n40 T"},
        "x.ds",
        r"metadata, byte 0: records other bytes of a token",
    ),
    ".ds: no dtype": ({"x.ds": TOKENS.tobytes()}, "x.ds", "does not tell the dtype"),
    ".ds: loss": (
        {"x.ds": TOKENS.tobytes(), "x.ds.index": ENDS, "x.ds.loss": b"1"},
        "x.ds",
        r"x\.ds\.loss, byte 1: has 1 bytes, but there are 40 tokens",
    ),
    ".ds: nothing": ({"x.ds": b"", "x.ds.index": b""}, "x.ds", "has no tokens"),
    ".npy: no dtype": ({"x.npy": TOKENS.tobytes()}, "x.npy", "does not tell the dtype"),
    ".npy: empty": ({"x.npy": b""}, "x.npy", "is empty"),
    ".npy: cut": ({"x.npy": npy(TOKENS)[:-2]}, "x.npy", "is not a complete .npy file"),
    ".npy: cut header": ({"x.npy": npy(TOKENS)[:30]}, "x.npy", "is not a complete .npy file"),
    ".npy: floats": (
        {"x.npy": npy(TOKENS.astype("f4"))},
        "x.npy",
        r"has float32 \[40\], not integers",
    ),
    ".npy: objects": (
        {"x.npy": npy(np.array([{}, {}]))},
        "x.npy",
        "is not a complete .npy file .Array can't be memory-mapped",
    ),
    ".npy: negative": (
        {"x.npy": npy(np.array([3, -1, 2]))},
        "x.npy",
        "token 1 of .* is -1, but tokens cannot be negative",
    ),
    ".npy: above every vocabulary": (
        {"x.npy": npy(np.array([3, 2**40]))},
        "x.npy",
        "token 1 of .* is 1,099,511,627,776, which no vocabulary has",
    ),
    "Parquet: magic": ({"x.parquet": b"PAR1" * 9}, "x.parquet", "is not readable parquet"),
    "Parquet: text": ({"x.parquet": table(text=["a"])}, "x.parquet", "is text, not tokens"),
    "Parquet: cut": (
        {"x.parquet": table(input_ids=[[1, 2]])[:-9]},
        "x.parquet",
        "is not readable parquet",
    ),
    "Parquet: null": (
        {"x.parquet": table(input_ids=[[1, None]])},
        "x.parquet",
        "block 0': has a null among its tokens",
    ),
    "Parquet: negative": (
        {"x.parquet": table(input_ids=[[1, 2], [-7]])},
        "x.parquet",
        "block 0': has token -7 at 2, not one from 0",
    ),
    "Parquet: no rows": (
        {"x.parquet": table(input_ids=[[1]], rows=0)},
        "x.parquet",
        "has no tokens",
    ),
    "Arrow: cut": ({"x.arrow": b"ARROW1\0\0" + b"x" * 80}, "x.arrow", "is not readable arrow"),
    "tar: cut": ({"x.tar": tar({"a.npy": npy(TOKENS)})[:900]}, "x.tar", "is not a complete tar"),
    "tar: text": ({"x.tar": tar({"a.txt": b"hello"})}, "x.tar", "is text, not tokens"),
    "tar: an object": ({"x.tar": tar({"a.json": b'{"text": "a"}'})}, "x.tar", "is text, not"),
    "tar: damaged sample": (
        {"x.tar": tar({"a.npy": npy(TOKENS), "b.npy": b"no array"})},
        "x.tar",
        r"x\.tar, b\.npy': cannot be read",
    ),
    "tar: negative": ({"x.tar": tar({"a.json": b"[1, -2]"})}, "x.tar", "has token -2 at 1"),
    "MDS: missing": ({"index.json": mds()}, ".", r"shard\.00000\.mds.*is missing, but"),
    "MDS: cut": (
        {"index.json": mds(), "shard.00000.mds": MDS[:-1]},
        ".",
        "has 49 bytes or more, but index.json records 50",
    ),
    "MDS: offsets": (
        {"index.json": mds(), "shard.00000.mds": MDS[:8] + b"\xff\xff\xff\xff" + MDS[12:]},
        ".",
        "does not have the 2 samples that index.json records",
    ),
    "MDS: samples": (
        {"index.json": mds(samples=3), "shard.00000.mds": MDS},
        ".",
        "does not have the 3 samples",
    ),
    "MDS: negative": ({"index.json": mds(samples=-1)}, ".", "is not an index of MDS shards"),
    "MDS: path": ({"index.json": mds(name="../x.mds")}, ".", "a shard named '../x.mds'"),
    "MDS: encoding": (
        {"index.json": mds(encoding="pkl"), "shard.00000.mds": MDS},
        ".",
        "is not readable as pkl",
    ),
    "nothing there": ({}, "x.bin", "does not exist"),
}


@pytest.mark.parametrize(("files", "name", "rule"), BAD.values(), ids=BAD.keys())
def test_bad_tokens_are_one_error_that_says_where(files, name, rule, tmp_path):
    for file, data in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(data)
    if "x.idx" in files and "x.bin" not in files and "missing" not in rule:
        (tmp_path / "x.bin").write_bytes(TOKENS.tobytes())
    with pytest.raises(ConfigError, match=rule) as error:
        open_tokens(tmp_path / name)
    assert error.value.field == "data.path" and "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_the_index_that_the_others_spoil_is_fine(tmp_path):
    (tmp_path / "x.idx").write_bytes(index())
    (tmp_path / "x.bin").write_bytes(TOKENS.tobytes())
    (tmp_path / "y.bin").write_bytes(llmc())
    assert open_tokens(tmp_path / "x").num_documents == 4
    assert open_tokens(tmp_path / "y.bin").num_tokens == 40


def config(path: Path | str, **values) -> Config:
    base = {"data.path": str(path), "data.seq_len": 8, "train.global_batch_size": 2}
    return replace(Config(), **base | values)


def loader_of(cfg: Config, split: str = "train") -> Loader:
    return Loader(cfg, make_mesh(ParallelConfig(data=1), jax.devices()[:1]), split)


@pytest.fixture
def tokens(tmp_path) -> Path:
    """A .bin file of nanoGPT's."""
    TOKENS.tofile(tmp_path / "x.bin")
    return tmp_path / "x.bin"


#: Fields set, the one that is wrong, and what the error must say.
MISUSED: dict[str, tuple[Callable[[Path], dict[str, object]], str, str]] = {
    "vocabulary": (
        lambda path: {"model.vocab_size": 40, "data.eos_id": 0},
        "model.vocab_size",
        r"above token id 40, which is in .*x\.bin",
    ),
    "unmarked documents": (
        lambda path: {},
        "data.document_mask",
        r"x\.bin does not mark the ends of documents",
    ),
    "a member of a mixture": (
        lambda path: {
            "data.mixture": (Source(str(path), 1), Source(f"{path}.none", 2)),
            "data.eos_id": 0,
        },
        "data.mixture",
        "does not exist",
    ),
    "too short": (
        lambda path: {"data.seq_len": 40, "data.eos_id": 0},
        "data.seq_len",
        r"needs 41 tokens, but train of .*x\.bin has 40",
    ),
}


@pytest.mark.parametrize(("values", "field", "rule"), MISUSED.values(), ids=MISUSED.keys())
def test_tokens_that_do_not_fit_the_config(values, field, rule, tokens):
    with pytest.raises(ConfigError, match=rule) as error:
        loader_of(config(tokens, **values(tokens)))
    assert error.value.field == field


def test_a_file_has_no_held_out_split(tokens):
    with pytest.raises(ConfigError, match="has no val split") as error:
        loader_of(config(tokens, **{"data.eos_id": 0}), "val")
    assert "--data.held-out" in error.value.fix
    values = {"data.eos_id": 0, "data.held_out": f"{tokens}.none"}
    with pytest.raises(ConfigError, match="does not exist") as error:
        loader_of(config(tokens, **values), "val")
    assert error.value.field == "data.held_out"


@pytest.mark.parametrize("token", [0, 8, 100, -1])
def test_a_token_beyond_the_vocabulary_in_a_prepared_folder(token, dataset, tmp_path):
    """Damage that neither sizes nor offsets tell: found where it is read, labels included."""
    for file in dataset.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = np.memmap(tmp_path / "train.bin", "<u2", "r+")
    at = range(len(stored))[token] if token >= 0 else (len(stored) - 1) // 8 * 8
    stored[at] = 60_000
    stored.flush()
    loader = loader_of(config(tmp_path))
    rule = rf"token {at:,} of .*train\.bin \(byte {2 * at:,}\) is 60000, outside the vocabulary of"
    with pytest.raises(ConfigError, match=rule):
        for step in range(loader.sequences_per_epoch[0] // 2 + 1):
            loader.host_rows(step, np.arange(2))


def test_nothing_is_written_for_bad_tokens(tmp_path, monkeypatch):
    """The training program refuses before it makes its folder; convert, before its output."""
    (tmp_path / "x.idx").write_bytes(changed(POINTERS + 24, i64(9_000)))
    (tmp_path / "x.bin").write_bytes(TOKENS.tobytes())
    run = tmp_path / "run"
    args = ["quickstart", "--data.path", str(tmp_path / "x"), "--run.dir", str(run)]
    monkeypatch.setattr("jaxpar.runtime.start.start", lambda *_: [])
    with pytest.raises(ConfigError, match="sequence 3 starts at byte 9,000"):
        call("train", [*args, "--train.global-batch-size", "16"])
    assert not run.exists()
    output = str(tmp_path / "out.bin")
    args = ["convert", "--input", str(tmp_path / "x"), "--output", output, "--to", "llmc"]
    assert main(args) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


@pytest.mark.parametrize(
    ("what", "options", "rule"),
    [
        ("nanogpt", [], "stores 16-bit tokens, but the vocabulary has 70,001"),
        ("megatron", [], "does not mark the ends of documents"),
        ("jaxpar", [], "does not mark the ends of documents"),
        ("llmc", ["--held-out", "y"], "needs --to jaxpar or manifest, not llmc"),
        ("llmc", ["--tokenizer", "bytes"], "has 257 tokens, but .* a vocabulary of 70,001"),
        ("llmc", ["--tokenizer", "none.json"], "is neither bytes, nor"),
    ],
)
def test_conversions_that_cannot_be(what, options, rule, tmp_path, capsys):
    head = np.zeros(256, "<i4")
    head[:3] = 20240801, 7, 2
    (tmp_path / "x.bin").write_bytes(head.tobytes() + np.array([70_000, 1], "<u4").tobytes())
    paths = ["--input", str(tmp_path / "x.bin"), "--output", str(tmp_path / "out")]
    assert main(["convert", *paths, "--to", what, *options]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(rule, error), error
    assert [p.name for p in tmp_path.iterdir()] == ["x.bin"]


@pytest.mark.parametrize("what", ["jaxpar", "megatron", "nanogpt", "llmc"])
@pytest.mark.parametrize(
    ("file", "token", "rule"),
    [
        ("train.bin", 7, r"train\.bin has sha256 .* but meta\.json records"),
        ("train.bin", 60_000, r"token 5 of .*train\.bin \(byte 10\) is 60000, outside the vocab"),
        ("train.documents.npy", 7, r"train\.documents\.npy has sha256 .* but meta\.json records"),
    ],
)
def test_a_damaged_folder_is_not_converted(what, file, token, rule, dataset, tmp_path, capsys):
    """Damage that sizes do not tell: one error, and no output."""
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for path in dataset.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    if file == "train.bin":
        np.memmap(source / file, "<u2", "r+")[5] = token
    else:
        np.load(source / file, mmap_mode="r+")[1] -= 1
    options = ["--to", what, *(["--eos-id", "256"] if what == "jaxpar" else [])]
    assert main(["convert", "--input", str(source), "--output", str(out), *options]) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(rule, error) and "config error: --input = " in error, error
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("name", json.loads((GOLDENS / "expected.json").read_text("utf-8")))
def test_damage_anywhere_is_an_error_of_one_line_or_other_tokens(name, tmp_path):
    """Cut, overwritten with zeros, ones or noise: never another exception."""
    random = np.random.default_rng(len(name))
    files = [file for file in (GOLDENS / name).rglob("*") if file.is_file()]
    for number in range(12):
        folder = tmp_path / str(number)
        shutil.copytree(GOLDENS / name, folder)
        victim = folder / files[number % len(files)].relative_to(GOLDENS / name)
        data = bytearray(victim.read_bytes())
        at, kind = int(random.integers(len(data))), int(random.integers(4))
        rest = data[at + 8 :] if kind else b""
        data[at:] = [b"", bytes(8), b"\xff" * 8, random.bytes(8)][kind] + rest
        victim.write_bytes(data)
        try:
            opened = open_tokens(folder, eos_id=0, hints=Hints("uint16"))
            opened.windows(np.array([0, opened.num_tokens - 5]), 5)
        except ConfigError as error:
            assert "\n" not in str(error)


def test_a_dtype_that_is_half_as_wide(tmp_path):
    (tmp_path / "x.npy").write_bytes(TOKENS.astype("<i8").tobytes())
    said = r"it has 64-bit tokens\. Fix: set --data\.token-dtype int64"
    with pytest.raises(ConfigError, match=said):
        open_tokens(tmp_path, hints=Hints("uint32"))
    assert open_tokens(tmp_path, hints=Hints("int64")).tokens[:].tolist() == TOKENS.tolist()
