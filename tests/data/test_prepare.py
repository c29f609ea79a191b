"""Preparing a dataset: what is in the folder, and that it is all there or not at all."""

import hashlib
import itertools
import json
import math
import shlex
import subprocess
import sys

import numpy as np
import pytest

from jaxpar.config import ConfigError
from jaxpar.data import tokenizer
from jaxpar.data.formats import readers
from jaxpar.data.formats.meta import read_meta, token_dtype
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.formats.writer import whole_folder
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare import documents
from jaxpar.data.prepare import text as encode
from jaxpar.data.prepare.splits import Shares, borders_of, place_of
from jaxpar.data.prepare.text import prepare
from jaxpar.data.tokenizer import load_tokenizer
from jaxpar.runtime.files import atomic
from tests.data.commands import main


def run(output, *inputs, **options):
    """prepare() with paths for text."""
    inputs = tuple(str(i) for i in inputs)
    return prepare(PrepareOptions(input=inputs, output=str(output), **options))


def stored_documents(folder, split):
    """Each document of a split, decoded, after checking that it ends as it must."""
    dataset, decode = TokenDataset.open(folder, split), load_tokenizer(folder).decode
    offsets = dataset.document_offsets
    texts = []
    for start, end in itertools.pairwise(offsets):
        assert dataset.tokens[end - 1] == dataset.meta.eos_id
        texts.append(decode(dataset.tokens[start : end - 1]))
    return texts


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_every_document_once(spec, corpus, texts, tmp_path):
    """Train and held-out documents are disjoint and together are the input, in order."""
    run(tmp_path / "out", corpus, tokenizer=spec, holdout=0.3)
    train = stored_documents(tmp_path / "out", "train")
    val = stored_documents(tmp_path / "out", "val")
    assert not set(train) & set(val)
    assert train == [t for t in texts if t in set(train)]
    assert sorted(train + val) == sorted(texts)
    assert 0.1 < len(val) / len(texts) < 0.5


def test_meta_describes_the_files(dataset):
    """Counts, hashes, bytes and entropy, each computed again from the files."""
    meta = read_meta(dataset)
    assert (meta.dtype, meta.vocab_size, meta.eos_id, meta.tokenizer) == (
        "uint16",
        257,
        256,
        "bytes",
    )
    for split, sizes in meta.splits.items():
        raw = (dataset / f"{split}.bin").read_bytes()
        documents = stored_documents(dataset, split)
        (part,) = sizes.parts
        assert part.sha256 == hashlib.sha256(raw).hexdigest()
        assert sizes.num_tokens == len(raw) // 2
        assert sizes.num_documents == len(documents)
        assert sizes.num_bytes == sum(len(t.encode()) for t in documents)
    tokens = np.fromfile(dataset / "train.bin", "<u2")
    p = np.array([np.mean(tokens == t) for t in set(tokens.tolist())])
    assert meta.unigram_entropy == pytest.approx(-np.sum(p * np.log(p)), rel=1e-12)


def test_fingerprint_follows_the_tokens(corpus, texts, tmp_path):
    """Same text, same fingerprint; other text, another."""
    first, again = (run(tmp_path / name, corpus) for name in "ab")
    assert first.fingerprint == again.fingerprint == read_meta(tmp_path / "a").fingerprint
    changed = tmp_path / "corpus.jsonl"
    changed.write_text(corpus.read_text("utf-8").replace("quick", "quack"), "utf-8")
    assert run(tmp_path / "c", changed).fingerprint != first.fingerprint


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_workers_and_piece_order(spec, corpus, tmp_path, monkeypatch):
    """The number of threads changes nothing, and long documents stay whole."""
    one = run(tmp_path / "one", corpus, tokenizer=spec, holdout=0.3, workers=1)
    monkeypatch.setattr(encode, "PIECE_CHARS", 50)
    five = run(tmp_path / "five", corpus, tokenizer=spec, holdout=0.3, workers=5)
    assert one == five
    if spec == "bytes":
        # Bytes do not care where a document is cut, so neither must the result.
        monkeypatch.setattr(readers, "PIECE_CHARS", 64)
        pieces = run(tmp_path / "pieces", corpus, holdout=0, workers=3)
        monkeypatch.undo()
        whole = run(tmp_path / "whole", corpus, holdout=0, workers=1)
        assert pieces.splits == whole.splits


def test_holdout_depends_on_content_alone():
    """Copies share a side, the share is as asked, and a larger one holds out a superset."""
    texts = [f"text {i}" for i in range(4000)]
    of = lambda text, h: borders_of(Shares(h)).split(place_of(text))  # noqa: E731
    held = {h: {t for t in texts if of(t, h) == "val"} for h in (0, 0.02, 0.1)}
    assert held[0] == set()
    assert held[0.02] < held[0.1]
    assert 0.07 < len(held[0.1]) / len(texts) < 0.13


def test_sizes_on_the_command_line(corpus, tmp_path, capsys):
    """They are written as a list of a config."""
    asked = ["prepare", "--input", str(corpus), "--output", str(tmp_path / "out"), "--split"]
    assert main([*asked, "4, 3,3"]) == 0
    assert read_meta(tmp_path / "out").splits == run(tmp_path / "b", corpus, split=(4, 3, 3)).splits
    assert main([*asked, "most,1,1", "--overwrite"]) == 2
    said = "--split = 'most,1,1': must be a list of numbers, separated by commas"
    assert said in (error := capsys.readouterr().err) and "--split 98,1,1" in error


def test_sizes_of_three_splits(corpus, texts, tmp_path):
    """Every document once; those held out are the same as without a test split."""
    out = tmp_path / "out"
    meta = run(out, corpus, split=(4, 3, 3))
    assert (meta.holdout, meta.test) == (0.3, 0.3) and read_meta(out) == meta
    train, val, test = (stored_documents(out, name) for name in ("train", "val", "test"))
    assert train + val + test != texts and sorted(train + val + test) == sorted(texts)
    run(tmp_path / "two", corpus, holdout=0.3)
    assert stored_documents(tmp_path / "two", "val") == val
    for split, documents_of in (("val", val), ("test", test)):
        assert 0.15 < len(documents_of) / len(texts) < 0.45
        assert meta.splits[split].num_documents == len(documents_of)
    assert not (tmp_path / "two" / "test.bin").exists()
    assert '"test": {' not in (tmp_path / "two" / "meta.json").read_text()
    with pytest.raises(ConfigError, match=r"empty test split.*--split 98,1,1"):
        TokenDataset.open(tmp_path / "two", "test")


def test_sizes_are_relative(corpus, tmp_path):
    first = run(tmp_path / "first", corpus, split=(70, 30, 0))
    assert first == run(tmp_path / "again", corpus, holdout=0.3)


def test_no_holdout(corpus, texts, tmp_path):
    """--holdout 0 trains on everything; the empty split is refused when it is opened."""
    meta = run(tmp_path / "out", corpus, holdout=0)
    assert meta.splits["train"].num_documents == len(texts)
    assert (tmp_path / "out" / "val.bin").read_bytes() == b""
    with pytest.raises(ConfigError, match="has an empty val split"):
        TokenDataset.open(tmp_path / "out", "val")


def test_stdlib(tmp_path, monkeypatch):
    """The input that needs no download."""
    sources = documents.find_sources(["stdlib"])[:60]
    monkeypatch.setattr("jaxpar.data.prepare.text.find_sources", lambda *_: sources)
    meta = run(tmp_path / "out", "stdlib", tokenizer="bpe:400", holdout=0.1)
    kept = [text for s in sources if (text := s.path.read_bytes().decode()).strip()]
    stored = stored_documents(tmp_path / "out", "train") + stored_documents(tmp_path / "out", "val")
    assert sorted(stored) == sorted(kept)
    assert meta.vocab_size == 400 and meta.inputs == ("stdlib",)


def test_tokenizer_file(corpus, tmp_path):
    """A tokenizer.json, or the folder that holds one."""
    first = run(tmp_path / "first", corpus, tokenizer="bpe:300")
    for i, path in enumerate([tmp_path / "first", tmp_path / "first" / "tokenizer.json"]):
        meta = run(tmp_path / f"again{i}", corpus, tokenizer=str(path))
        assert meta == first


def test_the_sample_of_a_bpe_is_an_option(corpus, tmp_path):
    """A smaller one is another tokenizer; from the size of the text on, it is the same."""
    tokenizers = [
        run(tmp_path / str(sample), corpus, tokenizer="bpe:300", tokenizer_sample=sample)
        for sample in (300, 1_000_000, 50_000_000)
    ]
    small, usual, large = (meta.tokenizer_fingerprint for meta in tokenizers)
    assert small != usual == large


def test_wide_vocabulary_is_stored_in_32_bits():
    """The last vocabulary that 16 bits hold, and the next."""
    assert token_dtype(65536) == np.dtype("<u2")
    assert token_dtype(65537) == np.dtype("<u4")


def test_blank_documents_are_dropped(tmp_path):
    """Nothing to learn from."""
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in ["a", "", " \n", "b"]))
    assert run(tmp_path / "out", path, holdout=0).splits["train"].num_documents == 2


@pytest.mark.parametrize(
    ("options", "field", "rule"),
    [
        ({"holdout": 1.0}, "--holdout", "below 1"),
        ({"holdout": -0.1}, "--holdout", "at least 0"),
        ({"holdout": float("nan")}, "--holdout", "at least 0"),
        ({"split": (98, 2)}, "--split", "three sizes"),
        ({"split": (0, 1, 1)}, "--split", "three sizes"),
        ({"split": (98, -1, 1)}, "--split", "three sizes"),
        ({"split": (98, math.nan, 1)}, "--split", "three sizes"),
        ({"split": (math.inf, 1, 1)}, "--split", "three sizes"),
        ({"split": ()}, "--split", "three sizes"),
        ({"split": (98, 1, 1), "holdout": 0.1}, "--holdout", "cannot go with --split"),
        ({"workers": 0}, "--workers", "at least 1"),
        ({"separator": ""}, "--separator", "must not be empty"),
        ({"tokenizer": "gpt3"}, "--tokenizer", "is neither bytes"),
        ({"tokenizer": "bpe:big"}, "--tokenizer", "is neither bytes"),
        ({"tokenizer": "bpe:100"}, "--tokenizer", "256 bytes"),
        ({"tokenizer": f"bpe:{'9' * 20}"}, "--tokenizer", "more than 8 digits"),
        ({"eos_token": "</s>"}, "--eos-token", r"needs a tokenizer\.json"),
        ({"input": ("missing.txt",)}, "--input", "does not exist"),
        ({"input": ()}, "--input", "must not be empty"),
    ],
)
def test_refusals_leave_nothing_behind(options, field, rule, corpus, tmp_path):
    """Option, rule, and no trace of an output."""
    options = {"input": (str(corpus),), "output": str(tmp_path / "deep" / "out")} | options
    with pytest.raises(ConfigError, match=rule) as error:
        prepare(PrepareOptions(**options))
    assert error.value.field == field
    assert not list(tmp_path.rglob("*out*"))


def test_empty_input(tmp_path):
    """A file without text."""
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match="has no text"):
        run(tmp_path / "out", tmp_path / "empty.txt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.txt"]


def test_existing_output(corpus, dataset, tmp_path):
    """A dataset is replaced only when asked; anything else never."""
    out = tmp_path / "out"
    out.mkdir()
    first = run(out, corpus, holdout=0.3)  # An empty folder is no obstacle.
    with pytest.raises(ConfigError, match="already has a dataset"):
        run(out, corpus)
    assert read_meta(out) == first
    assert run(out, corpus, holdout=0, overwrite=True) == read_meta(out) != first
    (out / "thesis.tex").touch()
    with pytest.raises(
        ConfigError, match=r"contains 'thesis\.tex', which is not part of a dataset"
    ):
        run(out, corpus, overwrite=True)
    with pytest.raises(ConfigError, match="is a file"):
        run(out / "thesis.tex", corpus, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_failure_keeps_the_old_dataset(corpus, tmp_path):
    """--overwrite with broken input loses nothing."""
    out, bad = tmp_path / "out", tmp_path / "bad.jsonl"
    first = run(out, corpus)
    bad.write_text('{"text": "fine"}\n{')
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2"):
        run(out, bad, overwrite=True)
    assert read_meta(out) == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "out"]


def test_interrupted_as_it_is_replaced(corpus, tmp_path, monkeypatch):
    """The old dataset is back in its place, since nothing was written."""
    out = tmp_path / "out"
    first = run(out, corpus)

    def interrupted(complete, path):
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(out, corpus, overwrite=True)
    assert read_meta(out) == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_interrupted(tmp_path):
    """Ctrl-C while writing leaves no folder."""
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "out", False) as folder:
        (folder / "train.bin").write_bytes(b"half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_encoder_failure_is_raised(corpus, tmp_path, monkeypatch):
    """An exception on an encoding thread ends the program with that exception."""

    def fail(self, texts):
        raise RuntimeError("encoder broke")

    monkeypatch.setattr(tokenizer.ByteTokenizer, "encode_batch", fail)
    with pytest.raises(RuntimeError, match="encoder broke"):
        run(tmp_path / "out", corpus)
    assert list(tmp_path.iterdir()) == []


def test_command_line(corpus, tmp_path, capsys):
    """Options reach prepare; the summary and the errors reach the person."""
    out = tmp_path / "out"
    args = ["prepare", "--input", str(corpus), "--output", str(out), "--holdout", "0.3"]
    assert main(args) == 0
    summary = capsys.readouterr().out
    sizes = read_meta(out).splits["train"]
    assert f"{sizes.num_tokens:,} tokens" in summary and "--model.vocab-size 384" in summary
    assert main(args) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"config error: --output = '{out}': already has a dataset")
    assert "--overwrite" in error
    assert main([*args, "--overwrite"]) == 0


def test_separator_on_the_command_line(tmp_path, capsys):
    r"""\n is a newline, as people write it."""
    (tmp_path / "all.txt").write_text("\n\n".join("abcdef"))
    out = tmp_path / "out"
    args = ["prepare", "--input", str(tmp_path), "--output", str(out), "--holdout", "0"]
    assert main([*args, "--separator", r"\n\n"]) == 0
    assert stored_documents(out, "train") == list("abcdef")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [("OSError(5, 'of a disk')", 1, "of a disk"), ("KeyboardInterrupt", 130, "interrup")],
)
def test_other_errors_are_those_of_all_programs(error, code, said):
    """A fault of the system has its traceback, and Ctrl-C has none."""
    program = f"""
import runpy
from jaxpar.data import command
def fail(options): raise {error}
command.run = fail
runpy.run_module("jaxpar.data", run_name="__main__", alter_sys=True)
"""
    command = [sys.executable, "-c", program, "inspect", "x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code and said in done.stderr
    assert ("Traceback" in done.stderr) == (code == 1)


def test_exit_codes():
    """As a process: help, and an option that does not exist."""
    program = [sys.executable, "-m", "jaxpar.data"]
    shown = subprocess.run([*program, "prepare", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and "--holdout" in shown.stdout
    piped = f"{shlex.join(program)} prepare --help | head -1"
    shown = subprocess.run(piped, shell=True, capture_output=True, text=True)
    assert shown.stdout.startswith("usage:") and "Traceback" not in shown.stderr
    refused = subprocess.run([*program, "prepare", "--tokens", "3"], capture_output=True, text=True)
    assert refused.returncode == 2
