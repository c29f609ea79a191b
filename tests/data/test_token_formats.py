"""Tokens of other programs: read as they are, written byte for byte, trained on directly."""

import hashlib
import json
import struct
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.config import Config, ConfigError, ParallelConfig, replace
from jaxpar.data.formats.convert import convert
from jaxpar.data.formats.inspect import inspect_tokens
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.loader import Loader
from jaxpar.data.options import ConvertOptions, InspectOptions, PrepareOptions
from jaxpar.data.prepare.text import prepare
from jaxpar.data.sources import fingerprint, open_tokens
from jaxpar.data.tokenizer import load_tokenizer
from jaxpar.sharding.mesh import make_mesh
from tests.data.commands import main
from tests.data.sequences import cut_sequences

NO_TOKEN = "must (not be negative|be at most 2,147,483,647)"

#: Two documents, of the tokens 5 6 7 0 and 8 300 0, as Megatron stores them in 16 bits.
GOLDEN_BIN = bytes.fromhex("0500 0600 0700 0000 0800 2c01 0000")
GOLDEN_IDX = bytes.fromhex(
    "4d4d494449445800 00"  # MMIDIDX, two zero bytes
    "0100000000000000"  # version
    "08"  # uint16
    "0200000000000000"  # sequences
    "0300000000000000"  # document indices
    "04000000 03000000"  # lengths
    "0000000000000000 0800000000000000"  # bytes at which they start
    "0000000000000000 0100000000000000 0200000000000000"  # first sequence of each document
)
TOKENS = np.array([5, 6, 7, 0, 8, 300, 0])
OFFSETS = [0, 4, 7]


@pytest.fixture
def pair(tmp_path) -> Path:
    """The prefix of the golden Megatron pair."""
    (tmp_path / "text_document.bin").write_bytes(GOLDEN_BIN)
    (tmp_path / "text_document.idx").write_bytes(GOLDEN_IDX)
    return tmp_path / "text_document"


def llmc(tokens: np.ndarray, magic: int = 20240520, version: int = 1) -> bytes:
    """A file of llm.c's."""
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(tokens)
    return head.tobytes() + tokens.astype("<u2" if magic == 20240520 else "<u4").tobytes()


def to(what: str, output: Path, *inputs: Path, **options) -> str:
    """convert() with paths for text."""
    names = tuple(str(path) for path in inputs)
    return convert(ConvertOptions(input=names, output=str(output), to=what, **options))


def one_device():
    return make_mesh(ParallelConfig(data=1), jax.devices()[:1])


def config(path: Path | str, **values) -> Config:
    """Short sequences of a source."""
    base = {"data.path": str(path), "data.seq_len": 16, "train.global_batch_size": 4}
    return replace(Config(), **base | values)


@pytest.mark.parametrize("name", ["text_document", "text_document.bin", "text_document.idx"])
def test_megatron_is_read_by_prefix_and_by_either_file(name, pair):
    opened = open_tokens(pair.with_name(name))
    np.testing.assert_array_equal(opened.tokens, TOKENS)
    assert opened.document_offsets[:].tolist() == OFFSETS
    assert (opened.num_documents, opened.vocab_size, opened.knows_documents) == (2, 301, True)


def test_megatron_is_written_byte_for_byte(pair, tmp_path):
    to("megatron", tmp_path / "out", pair)
    assert (tmp_path / "out.bin").read_bytes() == GOLDEN_BIN
    assert (tmp_path / "out.idx").read_bytes() == GOLDEN_IDX
    assert sorted(p.name for p in tmp_path.glob("*out*")) == ["out.bin", "out.idx"]


@pytest.mark.parametrize(("largest", "code", "size"), [(65498, 8, 2), (65499, 4, 4)])
def test_megatron_widens_where_megatron_does(largest, code, size, tmp_path):
    np.array([1, largest, 0], "<u2").tofile(tmp_path / "in.bin")
    to("megatron", tmp_path / "out", tmp_path / "in.bin", eos_id=0)
    assert (tmp_path / "out.idx").read_bytes()[17] == code
    assert (tmp_path / "out.bin").stat().st_size == 3 * size
    assert open_tokens(tmp_path / "out").vocab_size == largest + 1


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (3, "i2"), (4, "i4"), (5, "i8"), (8, "u2")])
def test_megatron_of_several_sequences_a_document_and_modes(code, dtype, tmp_path):
    """Documents of 2, 0 and 1 sequences, with the modes of multimodal data."""
    lengths, starts = np.array([2, 1, 3], "<i4"), np.array([0, 2, 3], "<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, 3, 4)
    pointers = starts * np.dtype(dtype).itemsize
    documents, modes = np.array([0, 2, 2, 3], "<i8"), np.zeros(3, "i1")
    parts = [lengths, pointers, documents, modes]
    (tmp_path / "x.idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    np.arange(6, dtype=dtype).tofile(tmp_path / "x.bin")
    opened = open_tokens(tmp_path / "x")
    assert opened.tokens[:].tolist() == list(range(6))
    assert opened.document_offsets[:].tolist() == [0, 3, 6]


def test_nanogpt_and_llmc_are_read(tmp_path):
    TOKENS.astype("<u2").tofile(tmp_path / "nano.bin")
    (tmp_path / "gpt2.bin").write_bytes(llmc(TOKENS))
    (tmp_path / "llama3.bin").write_bytes(llmc(TOKENS + 100_000, 20240801, 7))
    for name, more in [("nano", 0), ("gpt2", 0), ("llama3", 100_000)]:
        opened = open_tokens(tmp_path / f"{name}.bin", eos_id=more)
        assert opened.tokens[:].tolist() == (TOKENS + more).tolist()
        assert opened.document_offsets[:].tolist() == OFFSETS
        unmarked = open_tokens(tmp_path / f"{name}.bin")
        assert unmarked.document_offsets[:].tolist() == [0, 7] and not unmarked.knows_documents


def test_tokens_that_look_like_a_date_are_tokens(tmp_path):
    """40000 and 309 are a date as one 32-bit number, but no version follows."""
    tokens = np.array([40_000, 309, 17, 4_000, 5], "<u2")
    tokens.tofile(tmp_path / "x.bin")
    assert tokens[:2].view("<i4")[0] // 10_000 in range(2024, 2030)
    np.testing.assert_array_equal(open_tokens(tmp_path / "x.bin").tokens, tokens)


def test_conversions_lose_nothing(dataset, tmp_path):
    """From a prepared folder through every format and back: tokens, documents, tokenizer."""
    first = TokenDataset.open(dataset)
    to("megatron", tmp_path / "m", dataset)
    to("llmc", tmp_path / "l.bin", tmp_path / "m")
    to("nanogpt", tmp_path / "n.bin", tmp_path / "l.bin")
    to("nanogpt", tmp_path / "v.bin", dataset, split="val")
    assert (tmp_path / "n.bin").read_bytes() == (dataset / "train.bin").read_bytes()
    held_out = (str(tmp_path / "v.bin"),)
    output = tmp_path / "back"
    to("jaxpar", output, tmp_path / "n.bin", tokenizer="bytes", held_out=held_out)
    for split in ("train", "val"):
        assert (output / f"{split}.bin").read_bytes() == (dataset / f"{split}.bin").read_bytes()
        name = f"{split}.documents.npy"
        np.testing.assert_array_equal(np.load(output / name), np.load(dataset / name))
    back = TokenDataset.open(output)
    assert back.vocab_size == first.vocab_size and back.bytes_per_token is None
    assert back.parts[0].sha256 == first.parts[0].sha256
    assert load_tokenizer(output).kind == "bytes"


def test_several_inputs_become_one(pair, tmp_path):
    (tmp_path / "a.bin").write_bytes(llmc(TOKENS))
    to("jaxpar", tmp_path / "out", tmp_path / "a.bin", pair, tmp_path / "a.bin", eos_id=0)
    opened = TokenDataset.open(tmp_path / "out")
    assert opened.tokens[:].tolist() == TOKENS.tolist() * 3
    assert opened.document_offsets[:].tolist() == [0, 4, 7, 11, 14, 18, 21]
    with pytest.raises(ConfigError, match="converted without its tokenizer"):
        load_tokenizer(tmp_path / "out")


@pytest.mark.parametrize("what", ["megatron", "nanogpt", "llmc"])
def test_a_file_of_tokens_trains_like_the_folder_it_came_from(what, dataset, tmp_path):
    """The same batches, bit for bit, with document masking; only bits per byte are gone."""
    output = tmp_path / ("t" if what == "megatron" else "t.bin")
    to(what, output, dataset)
    eos = {} if what == "megatron" else {"data.eos_id": 256}
    values = {"evaluation.every": 0} | eos
    mesh = one_device()
    ours, theirs = Loader(config(dataset), mesh), Loader(config(output, **values), mesh)
    assert ours.max_documents == theirs.max_documents
    for step in (0, 7, 100):
        a, b = ours.host_rows(step, np.arange(4)), theirs.host_rows(step, np.arange(4))
        for name in ("tokens", "labels", "segment_ids", "positions"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert theirs.bytes_per_token(np.arange(4)) is None


def test_a_folder_of_two_files_has_two_splits(dataset, tmp_path):
    """As nanoGPT's prepare.py leaves them; and held-out tokens can be named apart."""
    for split in ("train", "val"):
        (tmp_path / f"{split}.bin").write_bytes((dataset / f"{split}.bin").read_bytes())
    cfg = config(tmp_path, **{"data.eos_id": 256})
    mesh = one_device()
    expected = TokenDataset.open(dataset, "val")
    opened = Loader(cfg, mesh, "val")
    apart = config(dataset, **{"data.held_out": str(tmp_path / "val.bin"), "data.eos_id": 256})
    for loader in (opened, Loader(apart, mesh, "val")):
        batch = loader.host_rows(0, np.arange(4))
        want = cut_sequences(expected.tokens, expected.document_offsets, np.arange(4), 16, True)
        np.testing.assert_array_equal(batch.labels, want.labels)


def test_identity_is_the_contents(pair, tmp_path):
    """A copy elsewhere is the same data; other tokens or documents are not."""
    for suffix in (".bin", ".idx"):
        copied = pair.with_suffix(suffix).read_bytes()
        (tmp_path / f"copy{suffix}").write_bytes(copied)
    same = fingerprint(config(pair))
    assert fingerprint(config(tmp_path / "copy")) == same
    (tmp_path / "copy.bin").write_bytes(GOLDEN_BIN[:-2] + b"\1\0")
    assert fingerprint(config(tmp_path / "copy")) != same


def test_a_folder_of_version_1_keeps_its_identity(dataset, tmp_path):
    """Runs that began on it can be resumed; it has the same batches, and is copied as it was."""
    values = json.loads((dataset / "meta.json").read_text("utf-8"))
    parts = {name: split["parts"][0] for name, split in values["splits"].items()}
    old = {
        name: {k: v for k, v in p.items() if "_hash" not in k and k != "name"}
        for name, p in parts.items()
    }
    text = json.dumps(values | {"version": 1, "splits": old}, indent=2) + "\n"
    for file in dataset.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "meta.json").write_text(text, "utf-8")
    assert fingerprint(config(tmp_path)) == hashlib.sha256(text.encode()).hexdigest()
    inspect_tokens(InspectOptions(path=str(tmp_path)))
    new, again = TokenDataset.open(dataset), TokenDataset.open(tmp_path)
    np.testing.assert_array_equal(new.tokens, again.tokens)
    assert new.bytes_per_token == again.bytes_per_token


def test_inspect(dataset, pair, tmp_path, capsys):
    assert main(["inspect", str(dataset)]) == 0
    shown = capsys.readouterr().out
    opened = TokenDataset.open(dataset, "val")
    assert f"val: {opened.num_tokens:,} tokens, {opened.num_documents:,} documents" in shown
    assert "begins with 'Document " in shown and "uint16, ids below 257" in shown
    assert main(["inspect", str(pair)]) == 0
    shown = capsys.readouterr().out
    assert "a Megatron pair" in shown and "7 tokens, 2 documents" in shown
    assert "ids below 301" in shown and "begins with tokens 5 6 7 0\n" in shown
    (tmp_path / "gpt2.bin").write_bytes(llmc(TOKENS))
    shown = inspect_tokens(InspectOptions(path=str(tmp_path / "gpt2.bin")))
    assert "llm.c" in shown and "unmarked documents" in shown


def test_inspect_compares_hashes(dataset, tmp_path):
    """A byte that changed in a prepared folder, which its size does not tell."""
    for file in dataset.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    data = bytearray((tmp_path / "train.bin").read_bytes())
    data[100] ^= 1
    (tmp_path / "train.bin").write_bytes(data)
    with pytest.raises(ConfigError, match=r"train\.bin has sha256 .* but meta\.json records"):
        inspect_tokens(InspectOptions(path=str(tmp_path)))


@pytest.mark.parametrize("token", [[70_000, 1], [1] * 99 + [70_000]])
def test_inspect_by_a_tokenizer_that_did_not_make_the_tokens(token, tmp_path, capsys):
    """Refused for ids that it lacks, also where the first text has none of them."""
    path = tmp_path / "x.bin"
    path.write_bytes(llmc(np.array(token), 20240801, 7))
    assert main(["inspect", str(path), "--tokenizer", "bytes"]) == 2
    error = capsys.readouterr().err.strip()
    rule = f"has 257 tokens, but {path} has a vocabulary of 70,001"
    assert error.startswith(f"config error: --tokenizer = 'bytes': {rule}. Fix: ")
    assert "\n" not in error


def test_convert_on_the_command_line(dataset, tmp_path, capsys):
    args = ["convert", "--input", str(dataset), "--output", str(tmp_path / "o.bin"), "--to", "llmc"]
    assert main(args) == 0
    assert "tokens (llmc)" in capsys.readouterr().out
    before = (tmp_path / "o.bin").read_bytes()
    assert main(args) == 2
    assert "exists. Fix: add --overwrite" in capsys.readouterr().err
    assert main([*args, "--overwrite"]) == 0 and (tmp_path / "o.bin").read_bytes() == before


def test_what_can_be_no_end_of_document_or_no_file_is_refused(tmp_path):
    tokens = tmp_path / "x.bin"
    np.arange(1, 100, dtype=np.uint16).tofile(tokens)
    out = tmp_path / "out"
    for eos in (-1, 1 << 31):
        with pytest.raises(ConfigError, match=f"--eos-id = {eos}: {NO_TOKEN}"):
            convert(ConvertOptions(input=(str(tokens),), output=str(out), to="jaxpar", eos_id=eos))
        with pytest.raises(ConfigError, match=NO_TOKEN):
            inspect_tokens(InspectOptions(path=str(tokens), eos_id=eos))
    with pytest.raises(ConfigError, match=r"--output = '\.': is a folder"):
        convert(ConvertOptions(input=(str(tokens),), output=".", to="megatron", eos_id=0))
    with pytest.raises(ConfigError, match=r"--output = 'gs://a/b': .*gs:// is not supported"):
        convert(ConvertOptions(input=(str(tokens),), output="gs://a/b", to="megatron", eos_id=0))
    assert not out.exists()


def test_ids_beyond_every_vocabulary_are_refused(tmp_path):
    """The counts of each token would take 16 GB."""
    tokens, out = tmp_path / "x.bin", tmp_path / "out"
    np.array([1, 2**24, 3], "<u4").tofile(tmp_path / "raw")
    llmc_header = np.zeros(256, "<i4")
    llmc_header[:3] = 20240801, 7, 3
    tokens.write_bytes(llmc_header.tobytes() + (tmp_path / "raw").read_bytes())
    options = {"input": (str(tokens),), "output": str(out), "to": "jaxpar"}
    with pytest.raises(ConfigError, match="has token ids up to 16,777,216, above the limit of"):
        convert(ConvertOptions(**options, eos_id=3))
    assert not out.exists()


def test_held_out_tokens_that_are_not_there(tmp_path, corpus):
    """The option that is wrong, and a fix that `convert` knows, not one for a run."""
    tokens, folder = tmp_path / "x.bin", tmp_path / "folder"
    np.arange(1, 100, dtype=np.uint16).tofile(tokens)
    prepare(PrepareOptions(input=(str(corpus),), output=str(folder), holdout=0))
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"--input = .* val split\. Fix: use --split train"):
        to("llmc", out, folder, split="val")
    with pytest.raises(ConfigError, match=r"--held-out = .* val split\. Fix: use one that has"):
        to("jaxpar", out, tokens, held_out=(str(folder),), eos_id=0)
    assert not out.exists()


def test_shards_beside_a_small_split_are_not_left_out(tmp_path):
    """nanoGPT's folder has two files; more tokens beside them are named."""
    for name, count in (("train.bin", 40), ("val.bin", 20), ("train_1.bin", 50)):
        np.arange(count, dtype="<u2").tofile(tmp_path / name)
    (tmp_path / "meta.pkl").write_bytes(b"")
    assert open_tokens(tmp_path).num_tokens == 40
    np.arange(70, dtype="<u2").tofile(tmp_path / "train_1.bin")
    rule = "has 1 other files of tokens, 140 bytes, which are not read"
    with pytest.raises(ConfigError, match=rule) as error:
        open_tokens(tmp_path)
    pattern = error.value.fix.split("'")[1]
    assert open_tokens(pattern).num_tokens == 110  # without those held out
    assert open_tokens(pattern, "val").num_tokens == 20
