"""Inputs of a few documents, or of one: each split has text, and a model trains on it."""

import json
import random
import re
import shlex
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxpar.config import Config, ConfigError, ParallelConfig
from jaxpar.config.command_line import read_config
from jaxpar.data.command import _model_of, train_command
from jaxpar.data.formats import readers
from jaxpar.data.formats.meta import read_meta
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.loader import open_loader
from jaxpar.data.options import PrepareChatOptions, PrepareOptions
from jaxpar.data.prepare.splits import Shares, borders_of, find_borders
from jaxpar.data.tokenizer import load_tokenizer
from jaxpar.sharding.mesh import make_mesh
from tests.data.commands import main

TEXT = "".join(f"line {i}: naïve 日本 and more\r\n" for i in range(500))


def prepare(source, out, *args) -> int:
    given = ["--input", str(source), "--output", str(out), "--overwrite"]
    return main(["prepare", *given, *(args or ("--tokenizer", "bytes"))])


def text_of(folder, split: str) -> str:
    dataset = TokenDataset.open(folder, split)
    return load_tokenizer(folder).decode(dataset.tokens[:-1])


@pytest.mark.parametrize("kind", ["in.txt", "in.jsonl"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize("split", ["98,2,0", "90,4,6", "50,0,50"])
def test_the_end_of_a_single_document_is_held_out(
    kind, tokenizer, split, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(readers, "PIECE_CHARS", 3000)
    data = TEXT.encode() if kind == "in.txt" else json.dumps({"text": TEXT}).encode()
    (tmp_path / kind).write_bytes(data)
    out, args = tmp_path / "out", ("--tokenizer", tokenizer, "--split", split)
    assert prepare(tmp_path / kind, out, *args) == 0
    assert "the input is one document; its end is cut off: " in capsys.readouterr().err
    names = [name for name, split in read_meta(out).splits.items() if split.num_tokens]
    assert "".join(text_of(out, name) for name in names) == TEXT
    sizes = [float(size) for size in split.split(",") if float(size)]
    for name, size in zip(names, sizes, strict=True):
        assert len(text_of(out, name)) / len(TEXT) == pytest.approx(size / sum(sizes), abs=1e-4)
        assert read_meta(out).splits[name].num_documents == 1
    assert prepare(tmp_path / kind, tmp_path / "stream", *args, "--stream") == 0
    assert read_meta(tmp_path / "stream") == read_meta(out)
    for name in names:
        stored, streamed = (TokenDataset.open(f, name) for f in (out, tmp_path / "stream"))
        assert np.array_equal(stored.tokens[:], streamed.tokens[:])


@pytest.mark.parametrize("num", [2, 3, 60])
def test_each_split_has_a_document(num, tmp_path):
    rows = "".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(num))
    (tmp_path / "in.jsonl").write_text(rows + '{"text": " "}\n')
    for args in ([], ["--holdout", "1e-9"], ["--holdout", "0.999999"], ["--split", "1,1,1e-9"]):
        code = prepare(tmp_path / "in.jsonl", tmp_path / "out", "--tokenizer", "bytes", *args)
        assert code == (2 if num == 2 and "--split" in args else 0)
        if code == 0:
            counts = [s.num_documents for s in read_meta(tmp_path / "out").splits.values()]
            assert sum(counts) == num and min(counts) >= 1


def test_borders_move_no_further_than_they_must():
    rng = random.Random(0)
    for _ in range(300):
        places = [rng.randrange(2**64) for _ in range(rng.choice((1, 2, 3, 5, 300)))]
        shares = Shares(rng.choice((0, 1e-6, 0.02, 0.5)), rng.choice((0, 1e-6, 0.3)))
        borders, plain = find_borders(iter(places), shares), borders_of(shares)
        splits = [borders.split(place) for place in places]
        if len(places) >= len(shares.asked):
            assert set(splits) >= set(shares.asked)
        before = [plain.split(place) for place in places]
        if set(before) >= set(shares.asked):
            assert borders == plain
        else:
            assert sum(a != b for a, b in zip(splits, before, strict=True)) <= 2
    assert find_borders(iter(range(20_000)), Shares(0.0, 0.0)) == borders_of(Shares(0.0))


def printed(capsys) -> Config:
    """Read the command that was printed, and open its data as training does."""
    command = shlex.split(re.search("train on it: (.*)", capsys.readouterr().out)[1])
    assert command[:3] == ["python", "-m", "jaxpar.train"]
    cfg = read_config(command[3:])
    mesh = make_mesh(ParallelConfig(data=1), jax.devices()[:1])
    for split in ("train", "val") if cfg.evaluation.every else ("train",):
        open_loader(cfg, mesh, split)
    return cfg


def test_conversations_with_the_tokenizer_of_a_model_fine_tune_it(tmp_path):
    """Those of other tokenizers train a small model, and so does text with any tokenizer."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    meta, chats = SimpleNamespace(kind=""), {"input": ("in.jsonl",), "output": "data/in"}
    for name in ("gpt2", "org/model", str(tmp_path / "model")):
        assert _model_of(PrepareChatOptions(tokenizer=name, **chats)) == name
        assert _model_of(PrepareOptions(tokenizer=name, **chats)) == ""
        assert train_command("data/in", meta, name) == (
            f"python -m jaxpar.train --from {name} --run.dir runs/in --data.path data/in"
        )
    for name in ("bytes", str(tmp_path / "model/config.json")):
        assert _model_of(PrepareChatOptions(tokenizer=name, **chats)) == ""


def test_the_output_is_named_after_the_input():
    names = {"stdlib": "stdlib", "hf:org/na-me:train": "na-me", "s3://b/x/y.jsonl.zst": "y"}
    for given, name in (names | {"a/b/": "b", "my text.txt": "my text"}).items():
        assert PrepareOptions(input=(given,)).output == f"data/{name}"
    assert PrepareOptions(input=("a", "b"), output="c").output == "c"
    for inputs in (("a", "b"), (".",)):
        with pytest.raises(ConfigError, match=r"--output = '': is missing"):
            PrepareOptions(input=inputs)


@pytest.mark.parametrize("size", [60, 600, 20_000])
def test_the_printed_command_is_complete(size, tmp_path, capsys, monkeypatch):
    """It names the data, its vocabulary, and sequences that fit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text(TEXT[:size])
    for args in ([], ["--holdout", "0"]):
        assert prepare("in.txt", "a b", "--tokenizer", "bytes", *args) == 0
        cfg = printed(capsys)
        assert (cfg.data.path, cfg.run.dir, cfg.model.vocab_size) == ("a b", "runs/a b", 384)
        assert bool(cfg.evaluation.every) == (not args)


def test_the_printed_command_holds_each_pair(tmp_path, capsys):
    rows = [{"prompt": "a" * n, "chosen": "b" * n, "rejected": "c"} for n in (3, 200, 90)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]
    assert main(["prepare-pairs", *args, "--tokenizer", "bytes"]) == 0
    cfg = printed(capsys)
    assert cfg.dpo.beta == 0.1 and cfg.data.seq_len == 640
