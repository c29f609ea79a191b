"""Streamed datasets: the tokens of prepared ones, from text that stays where it is."""

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpar.config import (
    BatchSize,
    Config,
    ConfigError,
    MixtureWeights,
    SequenceLength,
    Source,
    replace,
)
from jaxpar.data.formats.meta import read_meta
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.loader import Loader
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.text import prepare
from jaxpar.data.sources import fingerprint
from jaxpar.data.stream import texts as encoder
from jaxpar.data.stream import texts as texts_of_parts
from jaxpar.data.stream import workers as pool
from jaxpar.data.stream import writing
from jaxpar.data.stream.index import PART
from jaxpar.data.stream.writing import find_frames
from jaxpar.data.tokenizer import load_tokenizer
from jaxpar.runtime.exit_codes import RunError
from tests.data.commands import main
from tests.data.test_loader import MESHES, assert_same, make_mesh

KINDS = ["jsonl", "zst", "parquet", "arrow", "stream", "tar", "txt", "separated"]

#: One long text among short ones, as lines and as words.
LONG = "".join(f"line {i}: the quick  brown fox;\n\n\tjumps, naïvely\n" for i in range(600))


def zstd(text: bytes, frame: int, *, skippable: bool = False) -> bytes:
    """Compress text in frames of some bytes, which cut lines."""
    pieces = [text[i : i + frame] for i in range(0, len(text), frame)]
    extra = (0x184D2A53).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    return (extra if skippable else b"").join(pa.compress(p, "zstd", asbytes=True) for p in pieces)


def write_tar(path: Path, documents: list[str]) -> None:
    """Write samples: a text beside its metadata, or an object with a text, and an image."""
    with tarfile.open(path, "w") as archive:
        for i, text in enumerate(documents):
            members = {"json": json.dumps({"n": i}), "txt": text}
            if i % 2:
                members = {"json": json.dumps({"text": text}), "jpg": "no text"}
            for ending, content in members.items():
                about = tarfile.TarInfo(f"part.1/{i:04}.{ending}")
                about.size = len(content.encode())
                archive.addfile(about, io.BytesIO(content.encode()))


def write(folder: Path, kind: str, documents: list[str]) -> tuple[Path, dict]:
    """Write documents in a format. Returns: the file or folder, and the options to read it."""
    folder.mkdir()
    lines = "".join(json.dumps({"n": 1, "text": t}) + "\n\n" for t in documents).encode()
    table = pa.table({"n": list(range(len(documents))), "text": documents})
    if kind == "jsonl":
        (folder / "a.jsonl").write_bytes(lines)
    elif kind == "zst":
        blob = folder.with_name("blob")  # a link without an ending, as in the cache of the Hub
        blob.write_bytes(zstd(lines, 3000, skippable=True))
        (folder / "a.jsonl.zst").symlink_to(blob)
    elif kind == "parquet":
        pq.write_table(table, folder / "a.parquet", row_group_size=7)
    elif kind in ("arrow", "stream"):
        new = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with new(str(folder / "a.arrow"), table.schema) as out:
            for batch in table.to_batches(max_chunksize=9):
                out.write_batch(batch)
    elif kind == "tar":
        write_tar(folder / "a.tar", documents)
    elif kind == "txt":
        for i, text in enumerate(documents):
            (folder / f"{i:03}.txt").write_bytes(text.encode())
    else:
        marks = ["\n--\n", "\r\n--\r\n"]
        text = "".join(t + marks[i % 2] for i, t in enumerate(documents))
        (folder / "a.txt").write_bytes(text.encode())
        return folder, {"separator": "\\n--\\n"}
    return folder, {}


def both(tmp_path: Path, kind: str, documents: list[str], **options) -> tuple[Path, Path]:
    """Prepare the same text with and without --stream. Returns: the two folders."""
    source, more = write(tmp_path / "text", kind, documents)
    for name in ("stored", "streamed"):
        told = {"input": (str(source),), "output": str(tmp_path / name), **more, **options}
        prepare(PrepareOptions(stream=name == "streamed", **told))
    return tmp_path / "stored", tmp_path / "streamed"


@pytest.fixture
def small_parts(monkeypatch):
    """Short pieces and parts, so that short texts have several."""
    monkeypatch.setattr("jaxpar.data.formats.readers.PIECE_CHARS", 5000)
    monkeypatch.setattr(writing, "PART_CHARS", 100)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_same_tokens_as_prepared(kind, tokenizer, texts, tmp_path, small_parts):
    """In every format: the same description, documents and tokens, in any stretch."""
    stored, streamed = both(
        tmp_path, kind, [*texts, " ", LONG, ""], tokenizer=tokenizer, holdout=0.3
    )
    assert (stored / "meta.json").read_bytes() == (streamed / "meta.json").read_bytes()
    assert not (streamed / "train.bin").exists()
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        a, b = TokenDataset.open(stored, split), TokenDataset.open(streamed, split)
        np.testing.assert_array_equal(a.document_offsets, b.document_offsets)
        np.testing.assert_array_equal(a.tokens, b.tokens[:])
        assert b.tokens.dtype == a.tokens.dtype and b.tokens[-1] == a.tokens[-1]
        starts = rng.integers(0, a.num_tokens - 65, 40)
        np.testing.assert_array_equal(a.windows(starts, 65), b.windows(starts, 65))
        if LONG in texts or split == "train":
            assert len(b.tokens.arrays[0].parts) > b.num_documents


@pytest.fixture(scope="module")
def pair(texts, tmp_path_factory) -> tuple[Path, Path]:
    """The same documents, prepared and streamed. Tests must not write to them."""
    return both(tmp_path_factory.mktemp("pair"), "zst", [*texts, LONG], holdout=0.3)


def config(path: Path, **more) -> Config:
    """Reads a dataset in short sequences."""
    values = {"data.path": str(path), "data.seq_len": 16, "train.global_batch_size": 8}
    return replace(Config(), **{**values, "data.tokenize_workers": 0, **more})


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES.keys())
def test_same_batches_on_every_mesh(sizes, pair):
    """Training in a random order, over the end of an epoch, and the held-out split in order."""
    stored, streamed = map(config, pair)
    for split in ("train", "val"):
        a, b = Loader(stored, make_mesh(), split), Loader(streamed, make_mesh(**sizes), split)
        assert a.sequences_per_epoch == b.sequences_per_epoch
        some = a.first_sequences(3)
        assert a.bytes_per_token(some) == b.bytes_per_token(some)
        assert a.max_documents == b.max_documents
        for step in (0, 3, a.sequences_per_epoch[0] // 8):
            assert_same(a.batch(step), b.batch(step))


def test_same_batches_of_mixtures_and_schedules(pair, dataset):
    """Mixed with a prepared dataset, with weights, lengths and batches that change."""
    more = {
        "data.mixture_schedule": (MixtureWeights(2, (1, 3)),),
        "data.length_schedule": (SequenceLength(0, 8), SequenceLength(3, 16)),
        "train.batch_schedule": (BatchSize(0, 4), BatchSize(2, 8)),
    }
    a, b = (
        Loader(
            config(
                dataset,
                **more,
                **{"data.mixture": (Source(str(path), 2.0), Source(str(dataset), 1.0))},
            ),
            make_mesh(),
        )
        for path in pair
    )
    for step in range(6):
        assert_same(a.batch(step), b.batch(step))


def test_same_identity(pair):
    """A run may resume with either: the fingerprint of the data is the same."""
    assert fingerprint(config(pair[0])) == fingerprint(config(pair[1]))


def test_workers_tokenize(pair, monkeypatch):
    """Two processes give the same batches as none, ahead of time too, and are shared by splits."""
    cfg = config(pair[1], **{"data.tokenize_workers": 2})
    mesh = make_mesh(data=2)
    for split in ("train", "val"):
        loader, alone = Loader(cfg, mesh, split), Loader(config(pair[0]), mesh, split)
        ahead = loader.prefetched(5)
        for step in (5, 6):
            assert_same(next(ahead)[1], alone.batch(step))
        ahead.close()
    assert pool.pool.cache_info().currsize == 1
    with pytest.raises(ConfigError, match="is not the index"):
        pool.pool(2).encode(
            str(pair[1] / "none"), TokenDataset.open(pair[1]).tokens.arrays[0].parts[:4]
        )
    assert_same(loader.batch(0), alone.batch(0))  # an error does not end the workers


def test_dead_worker_is_an_error(pair):
    """A worker that is killed, for example for memory, ends the run with a message."""
    workers = pool.Pool(1)
    parts = TokenDataset.open(pair[1]).tokens.arrays[0].parts[:2]
    assert len(workers.encode(str(pair[1]), parts)) == 2
    workers._workers[0]._process.kill()
    with pytest.raises(RunError, match="ended with code -9"):
        workers.encode(str(pair[1]), parts)


@pytest.fixture
def copy(texts, tmp_path) -> Path:
    """A streamed dataset, and the text beside it, which a test may change."""
    return both(tmp_path, "jsonl", texts, holdout=0.3)[1]


def change(path: Path, old: bytes, new: bytes) -> None:
    """Change a file, and nothing about its size."""
    assert len(old) == len(new) and old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


def test_changed_text_is_refused(copy, tmp_path):
    """By size and by samples at the start; a missing file too."""
    file = tmp_path / "text" / "a.jsonl"
    text = file.read_bytes()
    change(file, b"quick", b"quack")
    with pytest.raises(ConfigError, match=r"a.jsonl, which has changed since.*prepare --stream"):
        TokenDataset.open(copy)
    file.write_bytes(text + b"\n")
    with pytest.raises(ConfigError, match=r"which had .* bytes and has"):
        TokenDataset.open(copy)
    file.unlink()
    with pytest.raises(ConfigError, match=r"a.jsonl, which is missing"):
        TokenDataset.open(copy)
    file.write_bytes(text)
    TokenDataset.open(copy)


@pytest.mark.parametrize("new", [b"quack", b'qu"ck', b"qu\\ck", b"qu\xffck"])
def test_text_that_changes_during_a_run_is_refused(new, copy, tmp_path):
    """Every text is compared with the index when it is tokenized."""
    dataset = TokenDataset.open(copy)
    change(tmp_path / "text" / "a.jsonl", b"quick", new)
    with pytest.raises(ConfigError, match=r"a.jsonl, which has changed since at"):
        dataset.tokens[:]


def test_damaged_index_is_refused(copy, capsys):
    """Whatever is wrong with it, by a message that names the file or the part."""
    stored = TokenDataset.open(copy.parent / "stored").tokens
    for name, size in (("train.parts.bin", PART.itemsize), ("train.starts.bin", 8)):
        whole = (copy / name).read_bytes()
        for cut, why in ((1, "not a multiple of"), (size, "meta.json records"), (None, "missing")):
            (copy / name).write_bytes(whole[:-cut]) if cut else (copy / name).unlink()
            with pytest.raises(ConfigError, match=why):
                TokenDataset.open(copy)
        for at in range(2 * size, 3 * size):  # every byte of a part
            damaged = bytearray(whole)
            damaged[at] ^= 1
            (copy / name).write_bytes(damaged)
            with pytest.raises(ConfigError, match=r"has changed since at|not in the order"):
                TokenDataset.open(copy).tokens[: len(stored) // 2]
        assert main(["inspect", str(copy)]) == 2 and name in capsys.readouterr().err
        (copy / name).write_bytes(whole)
    assert main(["inspect", str(copy)]) == 0
    (copy / "stream.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not the index of a streamed dataset"):
        TokenDataset.open(copy)


@pytest.mark.parametrize("sizes", [True, False])
def test_frames_of_any_file(sizes, tmp_path):
    """With and without lengths in their headers, raw and repeated blocks, and skippable frames."""
    rng = np.random.default_rng(0)
    texts = [b"a", b"a" * 1000, rng.bytes(300_000), b"words and words " * 40_000, b""]
    file, data = tmp_path / "a.zst", b""
    for text in texts:
        if sizes:
            data += pa.compress(text, "zstd", asbytes=True)
        else:
            sink = pa.BufferOutputStream()
            with pa.CompressedOutputStream(sink, "zstd") as out:
                out.write(text)
            data += sink.getvalue().to_pybytes()
        data += (0x184D2A50).to_bytes(4, "little") + (2).to_bytes(4, "little") + b"zz"
    file.write_bytes(data)
    frames = find_frames(file)
    assert [frame.text_size for frame in frames] == [len(text) for text in texts]
    for frame, text in zip(frames, texts, strict=True):
        packed = data[frame.start : frame.start + frame.size]
        assert pa.CompressedInputStream(pa.BufferReader(packed), "zstd").read() == text
    for cut in (1, 3, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:cut])
        with pytest.raises(ConfigError, match="is not a complete zstd file"):
            find_frames(file)


def test_what_cannot_be_read_from_the_middle_is_refused(texts, tmp_path, monkeypatch):
    """gzip, and frames or row groups above the limit; reframe makes files that can be read."""
    lines = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "b.jsonl.zst").write_bytes(zstd(lines, 10**6))
    pq.write_table(pa.table({"text": texts}), tmp_path / "c.parquet", use_dictionary=False)
    monkeypatch.setattr("jaxpar.data.stream.writing.MAX_BLOCK", 1000)
    monkeypatch.setattr("jaxpar.data.stream.reframe.FRAME_BYTES", 500)
    said = {"a.jsonl.gz": "gzip", "b.jsonl.zst": "a frame of", "c.parquet": "a row group of"}
    for name, why in said.items():
        options = {"input": (str(tmp_path / name),), "output": str(tmp_path / "out")}
        with pytest.raises(ConfigError, match=rf"{why}.*data reframe --input .*{name}"):
            prepare(PrepareOptions(stream=True, **options))
        assert not (tmp_path / "out").exists()
    told = ["--input", str(tmp_path / "a.jsonl.gz"), "--output", str(tmp_path / "copies")]
    names = [str(tmp_path / name) for name in said]
    assert main(["reframe", "--input", *names, "--output", str(tmp_path / "copies")]) == 0
    assert main(["reframe", *told]) == 2  # it exists
    copies = tmp_path / "copies"
    assert sorted(os.listdir(copies)) == ["a.jsonl.zst", "b.jsonl.zst", "c.jsonl.zst"]
    prepare(PrepareOptions(stream=True, input=(str(copies),), output=str(tmp_path / "out")))
    prepare(PrepareOptions(input=tuple(names), output=str(tmp_path / "stored")))
    stored = TokenDataset.open(tmp_path / "stored").tokens
    np.testing.assert_array_equal(TokenDataset.open(tmp_path / "out").tokens[:], stored)


def test_damaged_tar_files_are_refused(texts, tmp_path):
    """Truncated anywhere, without the field, not UTF-8, and what is no tar file."""
    file = tmp_path / "a.tar"
    write_tar(file, texts)
    whole, options = file.read_bytes(), {"input": (str(file),), "output": str(tmp_path / "out")}
    for content, said in (
        (whole[: 512 * 3 + 20], r"is not a complete tar file"),
        (whole[:512], r"is not a complete tar file"),
        (whole[: 512 * 4], r"complete tar file .*neither a member nor the end at byte 2,048"),
        (whole[: 512 * 4] + b"?" * 512 + whole[512 * 5 :], r"neither a member nor the end"),
        (b"no tar" * 200, r"is not a complete tar file"),
        (whole.replace(b'{"text": "Document 1', b'{"tixt": "Document 1'), r"object with the field"),
        (whole.replace(b'{"text": "Document 1', b'["text": "Document 1'), r"not valid JSON"),
        (whole.replace("naïve".encode(), b"na\xff\xffve"), r"0000.txt'?: is not UTF-8"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            prepare(PrepareOptions(**options))
    with tarfile.open(file, "w") as archive:
        archive.addfile(tarfile.TarInfo("a.jpg"), io.BytesIO(b""))
    with pytest.raises(ConfigError, match="has no text"):
        prepare(PrepareOptions(**options))


def test_parts_of_tokenizers_that_begin_with_a_space(tmp_path):
    """Llama 2's kind puts a space before each text; parts then leave out the space before them."""
    import tokenizers as library
    from tokenizers import models, normalizers

    vocab = {c: i for i, c in enumerate(["<unk>", "</s>", *"▁abcdefghijklmnopqrstuvwxyz.\n"])}
    made = library.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    documents = ["the quick brown fox jumps over the lazy dog. " * 500] * 3
    told = {"tokenizer": str(tmp_path / "tokenizer.json"), "holdout": 0.0}
    stored, streamed = both(tmp_path, "jsonl", documents, **told)
    tokens = TokenDataset.open(streamed).tokens
    assert len(tokens.arrays[0].parts) > 9 and tokens.arrays[0].parts["chars"].max() < 9000
    np.testing.assert_array_equal(tokens[:], TokenDataset.open(stored).tokens)


def test_uncuttable_text_is_one_part():
    """A tokenizer that looks at the whole text is exact, too, at the cost of larger parts."""
    reading = _Backwards()
    text = "some words and more " * 1000
    (part,) = writing.cut_text(text, reading.encode(text), reading)
    assert (part.first, part.chars) == (0, len(text))


class _Backwards:
    """Each token is a byte and the number of bytes after it: no part has the tokens of the text."""

    def encode(self, text: str) -> np.ndarray:
        return np.arange(len(text), 0, -1, dtype=np.int32)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]


def test_convert_stores_the_tokens(pair, tmp_path):
    """A streamed dataset becomes a prepared one."""
    output = tmp_path / "again"
    told = ["--input", str(pair[1]), "--output", str(output), "--to", "jaxpar"]
    assert main(["convert", *told, "--tokenizer", "bytes"]) == 0
    stored = TokenDataset.open(pair[0])
    np.testing.assert_array_equal(TokenDataset.open(output).tokens, stored.tokens)
    assert load_tokenizer(pair[1]).fingerprint == read_meta(pair[0]).tokenizer_fingerprint


def test_caches_are_bounded(pair, monkeypatch):
    """Few blocks, files and tokens are kept, and what was forgotten is read again."""
    monkeypatch.setattr(texts_of_parts, "KEPT_BLOCKS", 4000)
    monkeypatch.setattr(encoder, "KEPT_TOKENS", 100)
    tokens, stored = TokenDataset.open(pair[1]).tokens, TokenDataset.open(pair[0]).tokens
    reading = encoder.PartEncoder(pair[1])
    monkeypatch.setattr(tokens.arrays[0], "_encode", reading.encode)
    for start in (0, 2000, 500, 0):
        np.testing.assert_array_equal(tokens[start : start + 900], stored[start : start + 900])
        assert reading._kept._total <= 1000 and reading._texts._blocks._total <= 4000
