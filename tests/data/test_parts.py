"""Datasets of parts: the same tokens, documents, identity and batches for any number of them."""

import gzip
import itertools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jax.sharding import Mesh

from jaxpar.config import Config, ConfigError, replace
from jaxpar.data.formats import readers
from jaxpar.data.formats.arrays import DocumentOffsets, FileArray, Joined
from jaxpar.data.formats.identity import BASE, BLOCK, MODULUS, StreamHash
from jaxpar.data.formats.inspect import inspect_tokens
from jaxpar.data.formats.meta import read_meta
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.loader import Loader
from jaxpar.data.options import (
    InspectOptions,
    PrepareChatOptions,
    PrepareOptions,
    PreparePairsOptions,
)
from jaxpar.data.prepare import parts, text
from jaxpar.data.prepare.documents import InputFile
from jaxpar.data.prepare.progress import PreparationProgress
from jaxpar.data.prepare.records_command import prepare_records
from jaxpar.data.prepare.text import prepare
from jaxpar.sharding.axes import AXES
from tests.data.commands import main

SEVERAL = (2, 7)


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Path:
    """A folder of 20 files, some of them empty."""
    folder = tmp_path_factory.mktemp("files")
    for n in range(20):
        lines = [f"file {n}, line {i}: " + "the lazy dog " * (n * i % 9) for i in range(n % 6)]
        content = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (folder / f"{n:02}.jsonl").write_text(content)
    return folder


class Said(PreparationProgress):
    """Keeps the lines of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def log(self, line: str) -> None:
        self.lines.append(line)


def run(output: Path, files: Path, progress: PreparationProgress | None = None, **more):
    """Prepares them."""
    options = PrepareOptions(input=(str(files),), output=str(output), holdout=0.2, **more)
    return prepare(options, progress)


@pytest.fixture(scope="session")
def made(files, tmp_path_factory) -> dict[int, Path]:
    """The dataset in one part and in several. Tests must not write to it."""
    above = tmp_path_factory.mktemp("made")
    for count in (1, *SEVERAL):
        run(above / f"{count}", files, parts=count)
    return {count: above / f"{count}" for count in (1, *SEVERAL)}


def assert_same(one: Path, other: Path, names=("train", "val")) -> None:
    """Equal tokens, documents, targets, identity and frequencies."""
    for name in names:
        a, b = TokenDataset.open(one, name), TokenDataset.open(other, name)
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.document_offsets, b.document_offsets)
        assert (a.targets is None) == (b.targets is None)
        if a.targets is not None and b.targets is not None:
            np.testing.assert_array_equal(a.targets, b.targets)
        assert a.bytes_per_token == b.bytes_per_token
    a, b = read_meta(one), read_meta(other)
    assert (a.fingerprint, a.unigram_entropy) == (b.fingerprint, b.unigram_entropy)


@pytest.mark.parametrize("count", SEVERAL)
def test_any_number_of_parts_is_the_same_dataset(count, made):
    assert_same(made[1], made[count])
    opened = TokenDataset.open(made[count])
    assert len(read_meta(made[count]).splits["train"].parts) == count
    assert opened.files[0] == made[count] / "part-00000" / "train.bin"
    inspect_tokens(InspectOptions(path=str(made[count])))


@pytest.mark.parametrize("split", ["train", "val"])
def test_batches_do_not_depend_on_the_parts(split, made):
    """Sequences of 64 tokens cross the ends of parts."""

    def batches(path):
        values = {"data.path": str(path), "data.seq_len": 64, "train.global_batch_size": 8}
        mesh = Mesh(np.array(jax.devices()[:1]).reshape([1] * len(AXES)), AXES)
        loader = Loader(replace(Config(), **values), mesh, split)
        rows = [loader.host_rows(step, np.arange(8)) for step in range(9)]
        stacked = jax.tree.map(lambda *some: np.stack(some), *rows)
        return stacked, np.array(loader.max_documents)

    first = batches(made[1])
    for count in SEVERAL:
        jax.tree.map(np.testing.assert_array_equal, first, batches(made[count]))


@pytest.mark.parametrize("kind", ["lines", "array", "indented", "gz"])
def test_one_file_is_cut_at_its_lines(kind, tmp_path):
    """Blank lines, a mark at the start, bad rows and long ones are those of the whole file."""
    texts = [f"line {i} " + "long " * (i * i % 300) for i in range(60)]
    lines = [json.dumps({"text": text}) for text in texts]
    lines[7], lines[20], lines[33] = "{", "", " \t"
    content = "\ufeff" + "\r\n".join(lines)
    if kind in ("array", "indented"):
        indent = 1 if kind == "indented" else None
        content = json.dumps([{"text": text} for text in texts], indent=indent)
    path = tmp_path / ("a.jsonl.gz" if kind == "gz" else "a.jsonl")
    path.write_bytes(gzip.compress(content.encode()) if kind == "gz" else content.encode())
    for count in (1, 2, 9, 90):
        made = run(tmp_path / f"{count}", path, parts=count, on_bad_row="skip", workers=1)
        assert_same(tmp_path / "1", tmp_path / f"{count}")
        assert made.bad_rows == (kind in ("lines", "gz"))
        full = sum(bool(part.num_tokens) for part in made.splits["train"].parts)
        assert full == 1 if kind != "lines" else full >= min(count, 20)
    if kind == "lines":
        with pytest.raises(ConfigError, match=r"a\.jsonl, byte 605': is not valid JSON"):
            run(tmp_path / "bad", path, parts=90, workers=1)


@pytest.mark.parametrize("kind", ["parquet", "gz", "zst"])
def test_files_that_are_not_cut_anywhere(kind, tmp_path):
    """Parquet is cut between row groups. What parts have nothing is said."""
    texts = [f"row {i} " + "long " * (i * i % 300) for i in range(90)]
    texts[33] = ""
    (tmp_path / "in").mkdir()
    for n, size in enumerate((10, 50, 25, 5)):
        some, texts = texts[:size], texts[size:]
        path = tmp_path / "in" / f"{n}.jsonl.{kind}"
        content = "".join(json.dumps({"text": text}) + "\n" for text in some).encode()
        if kind == "parquet":
            table = pa.table({"id": range(size), "text": some})
            pq.write_table(table, path.with_name(f"{n}.parquet"), row_group_size=4)
        else:
            zstd = pa.compress(content, "zstd").to_pybytes()
            path.write_bytes(gzip.compress(content) if kind == "gz" else zstd)
    pieces = 3 + 13 + 7 + 2 if kind == "parquet" else 4
    for count in (1, 2, 4, 9, 40):
        said = Said()
        made = run(tmp_path / f"{count}", tmp_path / "in", said, parts=count, workers=1)
        assert_same(tmp_path / "1", tmp_path / f"{count}")
        inputs = sum(bool(part.num_tokens) for part in made.splits["train"].parts)
        assert inputs >= min(count, pieces) * 0.6
        empty = [line for line in said.lines if "parts are empty: the input is cut into" in line]
        assert bool(empty) == (count > pieces)


def test_errors_in_a_part_of_parquet_have_the_row_of_the_file(tmp_path):
    texts = ["fine"] * 40
    texts[30] = None
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=4)
    with pytest.raises(ConfigError, match=r"a\.parquet, row 31': column 'text' must be text"):
        run(tmp_path / "out", tmp_path / "a.parquet", parts=9, workers=1)


def test_shares_of_parts(tmp_path):
    """As near to equal as files can be cut; each is read once, in order."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 100)

    def sizes(files: list[int], count: int, lines=()) -> list[int]:
        names = {n: tmp_path / ("a.jsonl" if n in lines else f"{n}.gz") for n in range(len(files))}
        inputs = [InputFile(names[n], readers.read_jsonl, size) for n, size in enumerate(files)]
        cut = parts.cut_files(inputs, count)
        found = [(one.path, one.span or (0, one.num_bytes)) for part in cut for one in part]
        at = {path: 0 for path in names.values()}
        for path, (start, end) in found:
            assert at[path] == start
            at[path] = end
        assert at == {names[n]: size for n, size in enumerate(files)}
        order = [path for path, _ in itertools.groupby(path for path, _ in found)]
        assert order == [*names.values()]
        return [sum(one.num_bytes for one in part) for part in cut]

    assert sizes([30, 100, 100, 100], 4) == [30, 100, 100, 100]
    assert sizes([105, 95, 100, 100], 4) == [105, 95, 100, 100]
    assert sizes([10] * 9, 4) == [20, 20, 20, 30]
    assert sizes([90, 10, 10, 10], 2) == [90, 30]
    assert sizes([100, 1, 1, 0], 5) == [100, 1, 1, 0, 0]
    assert sizes([0, 0], 2) == [0, 0]
    assert sizes([1400, 100, 0], 3, lines=(0,)) == [500, 500, 500]
    assert sizes([70, 1400, 30], 3, lines=(1,)) == [500, 500, 500]


def chat(number: int) -> dict:
    answer = {"role": "assistant", "content": "yes" * number}
    return {"messages": [{"role": "user", "content": f"{number}?"}, answer]}


CHATS = [chat(number) for number in range(30)]
PAIRS = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no" * i} for i in range(1, 30)]


@pytest.mark.parametrize(
    ("rows", "options"), [(CHATS, PrepareChatOptions), (PAIRS, PreparePairsOptions)]
)
def test_chats_and_pairs(rows, options, tmp_path):
    for n in range(5):
        lines = (json.dumps(row) + "\n" for row in rows[n::5])
        (tmp_path / f"{n}.jsonl").write_text("".join(lines))
    inputs = tuple(str(tmp_path / f"{n}.jsonl") for n in range(5))
    for count in (1, 3):
        output = str(tmp_path / f"{count}")
        made = options(
            input=inputs, output=output, tokenizer="bytes", holdout=0.3, parts=count, workers=1
        )
        prepare_records(made)
    assert_same(tmp_path / "1", tmp_path / "3")
    assert read_meta(tmp_path / "3").splits["train"].has_targets
    inspect_tokens(InspectOptions(path=str(tmp_path / "3")))


# --------------------------------------------------------------------------- arrays of jobs


def test_tasks_in_any_order_and_again(made, files, tmp_path):
    """The last task to finish makes the dataset; later ones find it complete."""
    out = tmp_path / "out"
    for number in (6, 2, 0, 5, 1, 4):
        assert run(out, files, parts=7, part=number) is None
        assert not out.exists()
    with pytest.raises(ConfigError, match=r"is not complete: its parts are in .*out\.partial"):
        TokenDataset.open(out)
    assert run(out, files, parts=7, part=2) is None  # is complete
    assert run(out, files, parts=7, part=3) == read_meta(out)
    assert run(out, files, parts=7, part=3) == read_meta(out)
    assert (out / "meta.json").read_text() == (made[7] / "meta.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interrupted_command_goes_on(made, files, tmp_path, monkeypatch):
    """Complete parts are kept, what was being written is not, nor what a killed process left."""
    out, work, written = tmp_path / "out", tmp_path / "out.partial", []
    write = text.TextCorpus.write

    def interrupted(self, task, folder, report):
        written.append(task.number)
        if task.number == 3 and len(written) == 4:
            (folder / "train.bin").write_bytes(b"half")
            raise KeyboardInterrupt
        return write(self, task, folder, report)

    monkeypatch.setattr(text.TextCorpus, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(out, files, parts=7, workers=1)
    assert sorted(p.name for p in work.glob("*part*")) == [f"part-0000{n}" for n in range(3)]
    (work / ".part-00004.0123.tmp").mkdir()
    (work / ".part-00004.0123.tmp" / "train.bin").write_bytes(b"half")
    run(out, files, parts=7, workers=1)
    assert written == [0, 1, 2, 3, 3, 4, 5, 6] and not work.exists()
    assert (out / "meta.json").read_text() == (made[7] / "meta.json").read_text()
    assert not list(out.glob(".*"))


def test_parts_of_another_plan_are_refused(files, tmp_path):
    """By the options that differ. They are deleted when --overwrite asks for it."""
    out, work = tmp_path / "out", tmp_path / "out.partial"
    run(out, files, parts=3, part=0)
    with pytest.raises(ConfigError, match=r"out\.partial that differ in --parts") as error:
        run(out, files, parts=2)
    assert error.value.field == "--output"
    with pytest.raises(ConfigError, match=r"differ in --tokenizer"):
        run(out, files, parts=3, part=1, tokenizer="bpe:300", overwrite=True)
    copied = shutil.copytree(files, tmp_path / "copied")
    (copied / "05.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(ConfigError, match=r"differ in --input"):
        run(out, copied, parts=3, part=1)
    assert work.exists() and not out.exists()
    run(out, files, parts=2, overwrite=True)
    assert not work.exists() and len(read_meta(out).splits["train"].parts) == 2


def test_a_trained_tokenizer_is_that_of_the_plan(files, tmp_path):
    run(tmp_path / "one", files, tokenizer="bpe:300")
    for number in range(3):
        run(tmp_path / "three", files, tokenizer="bpe:300", parts=3, part=number)
    assert_same(tmp_path / "one", tmp_path / "three")


@pytest.mark.parametrize(
    ("options", "field", "rule"),
    [
        ({"parts": 4, "part": 4}, "--part", "must be below the number of parts, 4"),
        ({"part": 1}, "--part", "must be below the number of parts, 1"),
        ({"parts": 2, "stream": True}, "--parts", "cannot go with --stream"),
        ({"parts": 2, "part": 0, "output": "s3://b/c", "overwrite": True}, "--overwrite", "--part"),
    ],
)
def test_refusals(options, field, rule, files, tmp_path):
    told = {"input": (str(files),), "output": str(tmp_path / "out")} | options
    with pytest.raises(ConfigError, match=rule) as error:
        prepare(PrepareOptions(**told))
    assert error.value.field == field and not list(tmp_path.iterdir())


@pytest.mark.waits
def test_batches_of_a_part_are_encoded_in_processes(made, files, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "WORKER_BYTES", 1)
    monkeypatch.setattr("jaxpar.data.prepare.encoding.PIECE_CHARS", 500)
    run(tmp_path / "out", files, workers=2)
    assert_same(made[1], tmp_path / "out")


@pytest.mark.waits
def test_parts_are_written_in_processes(files, tmp_path, monkeypatch):
    """The error of one is that of the command. Complete ones are kept: as the last begins, at most
    one of the three before is not."""
    monkeypatch.setattr(parts, "WORKER_BYTES", 1)
    copied = shutil.copytree(files, tmp_path / "copied")
    (copied / "19.jsonl").write_text('{"text": "fine"}\n{')
    with pytest.raises(ConfigError, match=r"19\.jsonl:2"):
        run(tmp_path / "out", copied, parts=4, workers=2)
    left = {path.name for path in (tmp_path / "out.partial").glob("part-*")}
    assert len(left & {"part-00000", "part-00001", "part-00002"}) >= 2 and "part-00003" not in left


# ------------------------------------------------------------------------ reading, and joining


@pytest.mark.parametrize("name", ["train.bin", "train.documents.npy", "val.bin"])
def test_damage_of_a_part_is_found(name, made, tmp_path):
    copy = shutil.copytree(made[2], tmp_path / "copy")
    path = copy / "part-00001" / name
    data = bytearray(path.read_bytes())
    data[-8 if name.endswith("bin") else -16] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"part-00001/{name} has sha256"):
        inspect_tokens(InspectOptions(path=str(copy)))
    path.unlink()
    with pytest.raises(ConfigError, match=rf"part-00001/{name} (is missing|cannot be read)"):
        TokenDataset.open(copy, name.partition(".")[0])


def test_a_manifest_joins_without_a_copy(made, files, tmp_path, capsys):
    """It is what a copy would be; other tokenizers, and files of other programs, are refused."""
    both = ["--input", str(made[1]), str(made[7]), "--held-out", str(made[2])]
    for to in ("manifest", "jaxpar"):
        told = ["--output", str(tmp_path / to), "--to", to]
        more = ["--tokenizer", "bytes"] if to == "jaxpar" else []
        assert main(["convert", *both, *told, *more]) == 0
    assert_same(tmp_path / "manifest", tmp_path / "jaxpar")
    assert not list((tmp_path / "manifest").rglob("*.bin"))
    assert main(["inspect", str(tmp_path / "manifest")]) == 0
    assert "in 8 parts" in capsys.readouterr().out
    run(tmp_path / "bpe", files, tokenizer="bpe:300")
    told = ["--input", str(made[1]), str(tmp_path / "bpe"), "--output", str(tmp_path / "no")]
    assert main(["convert", *told, "--to", "manifest"]) == 2
    assert "different values of vocab_size" in capsys.readouterr().err
    told = ["--input", str(made[1] / "train.bin"), "--eos-id", "256"]
    assert main(["convert", *told, "--output", str(tmp_path / "no"), "--to", "manifest"]) == 2
    assert "use --to jaxpar, which copies" in capsys.readouterr().err


def test_identity_is_that_of_the_streams(made, tmp_path):
    """Where parts end, and names of inputs, do not count; each stream and the end of text do."""
    meta = read_meta(made[7])
    for name in ("tokens_hash", "documents_hash", "targets_hash", "targets_sha256"):
        values = json.loads((made[7] / "meta.json").read_text())
        digits = 64 if name.endswith("sha256") else 16
        if name.startswith("targets"):
            for part in values["splits"]["val"]["parts"]:
                part |= {"targets_hash": "1" * 16, "targets_sha256": "1" * 64}
        values["splits"]["val"]["parts"][1][name] = "1" * digits
        (tmp_path / "meta.json").write_text(json.dumps(values))
        assert read_meta(tmp_path).fingerprint != meta.fingerprint
    values = json.loads((made[7] / "meta.json").read_text()) | {"eos_id": 0}
    (tmp_path / "meta.json").write_text(json.dumps(values))
    assert read_meta(tmp_path).fingerprint != meta.fingerprint
    del values["splits"]["train"]["parts"][0]["tokens_hash"]
    (tmp_path / "meta.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="a part of train without the hashes"):
        read_meta(tmp_path)


@pytest.mark.parametrize("bound", [2, 1 << 16, 1 << 24, 1 << 45])
@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
def test_hash_of_a_stream(bound, count):
    """That of its definition, however it is cut."""
    values = np.random.default_rng(0).integers(0, bound, count)
    expected = 0
    for value in values.tolist():
        expected = (expected * BASE + value) % MODULUS
    for at in (0, count // 3, count):
        first, second = StreamHash(), StreamHash()
        first.update(values[:at])
        second.update(values[at:])
        assert first + second == StreamHash(expected, count)
        first.update(values[at:])
        assert first == StreamHash(expected, count)


def test_arrays_in_a_row(tmp_path):
    """Windows and searches, of parts with and without documents of no tokens, as of one array."""
    draws = np.random.default_rng(0)
    for trial in range(50):
        lengths = draws.integers(1, 30, draws.integers(1, 5))
        ends = [np.sort(draws.integers(trial % 2, n + 1, draws.integers(0, 6))) for n in lengths]
        ends = [np.unique(one) if trial % 2 else one for one in ends]
        starts = [np.array([0, *one, n]) for one, n in zip(ends, lengths, strict=True)]
        before = np.cumsum([0, *lengths])
        whole = np.concatenate([[0], *(s[1:] + b for s, b in zip(starts, before, strict=False))])
        offsets = DocumentOffsets(starts)
        np.testing.assert_array_equal(offsets, whole)
        values = np.arange(-1, before[-1] + 2)
        for side in ("left", "right"):
            found = offsets.searchsorted(values, side=side)
            np.testing.assert_array_equal(found, np.searchsorted(whole, values, side=side))
        assert (offsets[-1], len(offsets)) == (whole[-1], len(whole))
        at = draws.integers(0, len(whole), (3, 4))
        np.testing.assert_array_equal(offsets[at], whole[at])
        tokens, arrays = np.arange(before[-1], dtype="<u2"), []
        for n, (first, end) in enumerate(itertools.pairwise(before)):
            tokens[first:end].tofile(tmp_path / f"{n}")
            arrays.append(FileArray(tmp_path / f"{n}", tokens.dtype, int(end - first)))
        joined = Joined(arrays)
        length = int(draws.integers(1, before[-1] + 1))
        firsts = draws.integers(0, before[-1] - length + 1, 9)
        expected = np.stack([tokens[start : start + length] for start in firsts])
        np.testing.assert_array_equal(joined.windows(firsts, length), expected)
        np.testing.assert_array_equal(joined[3:-2:2], tokens[3:-2:2])
        assert joined.place(int(before[-1]) - 1).startswith(f"token {lengths[-1] - 1:,} of")
    with pytest.raises(IndexError, match=r"document \[99\]"):
        offsets[np.array([99])]
