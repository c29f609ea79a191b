"""Chat data: written as the template says, and learnt only where the assistant speaks."""

import gzip
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

from jaxpar.config import Config, ConfigError, ParallelConfig, Source, replace
from jaxpar.data.formats.convert import convert
from jaxpar.data.formats.inspect import inspect_tokens
from jaxpar.data.formats.meta import read_meta
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.loader import Loader
from jaxpar.data.options import ConvertOptions, InspectOptions, PrepareChatOptions
from jaxpar.data.prepare.chat import TEMPLATES, ChatEncoder
from jaxpar.data.prepare.records_command import prepare_records
from jaxpar.data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer, train_bpe
from jaxpar.sharding.batch import IGNORED
from jaxpar.sharding.mesh import make_mesh
from tests.data.commands import main

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>"]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>"]

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": " Four.\n"},
    {"role": "user", "content": "And then? <|im_end|>"},
    {"role": "assistant", "content": "日本"},
]

#: MESSAGES as each template's publisher writes them, and what of it is learnt.
WRITTEN = {
    "plain": (
        "system:\nBe brief.<|endoftext|>user:\nWhat is 2 + 2?<|endoftext|>assistant:\n Four.\n"
        "<|endoftext|>user:\nAnd then? <|im_end|><|endoftext|>assistant:\n日本<|endoftext|>",
        " Four.\n<|endoftext|>日本<|endoftext|>",
    ),
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n Four.\n<|im_end|>\n<|im_start|>user\nAnd then? <|im_end|>"
        "<|im_end|>\n<|im_start|>assistant\n日本<|im_end|>\n",
        " Four.\n<|im_end|>日本<|im_end|>",
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2 + 2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nFour.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd then? <|im_end|><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n日本<|eot_id|>",
        "Four.<|eot_id|>日本<|eot_id|>",
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> JsonTokenizer:
    """A small BPE with the special tokens of chat models."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["the user and the assistant talk"] * 9, 300).save(folder)
    with_special = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with_special.add_special_tokens(SPECIAL)
    return JsonTokenizer(with_special.to_str(), "<|endoftext|>")


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """Forty conversations of one turn, in two files, one of them compressed."""
    folder = tmp_path_factory.mktemp("chats")
    lines = [
        json.dumps({"messages": [message("user", f"say {i}"), message("assistant", "so " * i)]})
        for i in range(1, 41)
    ]
    (folder / "a.jsonl").write_text("\n".join(lines[:20]) + "\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[20:]).encode()))
    return folder


@pytest.fixture(scope="module")
def chat(chats, tmp_path_factory) -> Path:
    """The same as bytes, some held out. Tests must not write to it."""
    output = tmp_path_factory.mktemp("prepared") / "chat"
    options = {"input": (str(chats),), "output": str(output), "tokenizer": "bytes"}
    prepare_records(PrepareChatOptions(**options, holdout=0.2))
    return output


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def config(path: Path, **values) -> Config:
    base = {"data.path": str(path), "data.seq_len": 16, "train.global_batch_size": 4}
    return replace(Config(), **base | values)


def loader_of(cfg: Config) -> Loader:
    return Loader(cfg, make_mesh(ParallelConfig(data=1), jax.devices()[:1]))


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_begins_as_in_training(name, tokenizer):
    encoder = ChatEncoder(name, tokenizer)
    answered = encoder.encode([*MESSAGES, message("user", "ok?"), message("assistant", "yes")]).ids
    asked = encoder.prompt([*MESSAGES, message("user", "ok?")])
    assert answered[: len(asked)].tolist() == asked
    rest = answered[len(asked) :].tolist()
    assert tokenizer.decode(rest[: rest.index(encoder.end_id)]) == "yes"
    assert ChatEncoder.fits(name, tokenizer)
    assert ChatEncoder.fits(name, ByteTokenizer()) == (name == "plain")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_written_as_published(name, tokenizer):
    text, learnt = WRITTEN[name]
    ids, targets = ChatEncoder(name, tokenizer).encode(MESSAGES)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids[targets]) == learnt
    assert ids.dtype == np.int32 and targets.dtype == bool and len(ids) == len(targets)


def test_no_message_forges_a_special_token(tokenizer):
    """The user wrote <|im_end|> once; the template, five times."""
    ids, _ = ChatEncoder("chatml", tokenizer).encode(MESSAGES)
    assert np.count_nonzero(ids == tokenizer.id_of("<|im_end|>")) == 5


def test_bytes_have_no_special_tokens_but_one():
    ids, _ = ChatEncoder("plain", ByteTokenizer()).encode(MESSAGES)
    assert np.count_nonzero(ids == 256) == 5
    with pytest.raises(ConfigError, match=r"needs the token <\|im_start\|>"):
        ChatEncoder("chatml", ByteTokenizer())


def test_a_folder_of_conversations(chat):
    """A document each; targets are whole answers; both splits."""
    decode, answers = load_tokenizer(chat).decode, set()
    for split in ("train", "val"):
        opened = TokenDataset.open(chat, split)
        assert opened.bytes_per_token is None and opened.num_documents > 2
        for start, end in zip(opened.document_offsets, opened.document_offsets[1:], strict=False):
            ids, marks = opened.tokens[start:end], opened.targets[start:end].astype(bool)
            answers.add(decode(ids[marks]))
            assert decode(ids[~marks]).startswith("user:\nsay ")
    assert answers == {"so " * i + "<|endoftext|>" for i in range(1, 41)}


def test_only_targets_are_labels(chat):
    """Every label is what the assistant says, every such token is one; `all` is everything."""
    dataset = TokenDataset.open(chat)
    loader, every = loader_of(config(chat)), loader_of(config(chat, **{"data.loss_on": "all"}))
    offsets = set(dataset.document_offsets[:].tolist())
    for step in range(6):
        some, whole = (l.host_rows(step, np.arange(4)) for l in (loader, every))  # noqa: E741
        for name in ("tokens", "segment_ids", "positions"):
            np.testing.assert_array_equal(getattr(some, name), getattr(whole, name))
        order = loader._sequences[0]
        for row, number in enumerate(order(step * 4 + np.arange(4))):
            start = int(number) * 16
            marks = dataset.targets[start + 1 : start + 17].astype(bool)
            first = np.array([start + 1 + t in offsets for t in range(16)])
            following = dataset.tokens[start + 1 : start + 17].astype(np.int32)
            np.testing.assert_array_equal(some.labels[row], np.where(marks, following, IGNORED))
            np.testing.assert_array_equal(whole.labels[row], np.where(first, IGNORED, following))


def test_chat_mixes_with_text(chat, dataset):
    """In text every token is learnt, in chat the targets; positions of both restart."""
    mixture = {"data.mixture": (Source(str(chat), 1.0), Source(str(dataset), 1.0))}
    loader = loader_of(config(chat, **mixture))
    alone = {str(p): loader_of(config(p)) for p in (chat, dataset)}
    sources, before = loader._mixture.places(np.arange(40))
    for number, (source, rank) in enumerate(zip(sources, before, strict=True)):
        row = loader.host_rows(number // 4, np.array([number % 4]))
        path = str(loader.sources[source].dataset.path)
        window = int(loader._sequences[source](np.array([rank]))[0])
        there = alone[path]
        there._sequences = [lambda numbers: numbers]
        want = there._packed_sequences(np.array([window]), np.array([0]), 16)
        for name in ("tokens", "labels", "segment_ids", "positions"):
            np.testing.assert_array_equal(getattr(row, name), getattr(want, name))


def test_targets_are_part_of_the_identity_and_checked(chat, tmp_path):
    copy = shutil.copytree(chat, tmp_path / "copy")
    meta = read_meta(copy)
    assert "targets_sha256" in (copy / "meta.json").read_text()
    assert meta.fingerprint == read_meta(chat).fingerprint
    assert "of the tokens are targets" in inspect_tokens(InspectOptions(path=str(copy)))
    marks = np.fromfile(copy / "train.targets.bin", np.uint8)
    (1 - marks).tofile(copy / "train.targets.bin")
    with pytest.raises(ConfigError, match=r"train\.targets\.bin has sha256"):
        inspect_tokens(InspectOptions(path=str(copy)))
    marks[:-1].tofile(copy / "train.targets.bin")
    with pytest.raises(ConfigError, match=r"train\.targets\.bin has .* bytes, but meta.json"):
        TokenDataset.open(copy)
    (copy / "train.targets.bin").unlink()
    with pytest.raises(ConfigError, match=r"train\.targets\.bin is missing"):
        TokenDataset.open(copy)


def test_conversion_does_not_lose_targets_silently(chat, tmp_path):
    options = {"output": str(tmp_path / "out"), "to": "megatron"}
    with pytest.raises(ConfigError, match="does not keep its targets"):
        convert(ConvertOptions(input=(str(chat),), **options))


BAD = [
    ('{"text": "hello"}', "is not a JSON object with a list of messages in 'messages'"),
    ('{"messages": []}', "is not a JSON object with a list of messages"),
    ("[1]", "is not a JSON object with a list of messages"),
    ('{"messages": [', "is not valid JSON"),
    ('{"messages": ["hello"]}', "message 1 has role None"),
    ('{"messages": [{"role": "human", "content": "x"}]}', "message 1 has role 'human', not one of"),
    ('{"messages": [{"role": "user"}]}', "message 1's content must be text, not NoneType"),
    ('{"messages": [{"role": "user", "content": ["x"]}]}', "must be text, not list"),
    ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "is not Unicode"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "has no message of the assistant"),
]


@pytest.mark.parametrize(("line", "rule"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_and_nothing_is_written(line, rule, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES}) + "\n\n" + line)
    options = {"output": str(tmp_path / "out"), "tokenizer": "bytes", "holdout": 0.0}
    with pytest.raises(ConfigError, match=rule) as error:
        prepare_records(PrepareChatOptions(input=(str(path),), **options))
    assert error.value.value == f"{path}:3" and "--text-field" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.jsonl"]


def test_chat_on_the_command_line(chats, tmp_path, capsys):
    out = tmp_path / "out"
    args = ["prepare-chat", "--input", str(chats), "--output", str(out), "--tokenizer", "bytes"]
    assert main([*args, "--holdout", "0.2"]) == 0
    assert f"--run.dir runs/out --data.path {out} --model" in capsys.readouterr().out
    assert main([*args, "--overwrite", "--holdout", "1"]) == 2
    assert main([*args, "--overwrite", "--split", "6,2,2"]) == 0
    assert "  test " in capsys.readouterr().out
    (tmp_path / "x.txt").write_text("hello")
    assert main(["prepare-chat", "--input", str(tmp_path / "x.txt"), *args[3:]]) == 2
    assert "is not one of .jsonl" in capsys.readouterr().err
