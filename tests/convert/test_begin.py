"""What stands before a prompt: what stood before the texts that a model has learnt."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from jaxpar.config import Config, replace
from jaxpar.convert.hf import importing
from jaxpar.convert.hf.tokenizer import begin_of_prompts
from jaxpar.data.options import PrepareChatOptions, PrepareOptions
from jaxpar.data.prepare.records_command import prepare_records
from jaxpar.data.prepare.text import prepare
from jaxpar.data.tokenizer import load_tokenizer
from jaxpar.inference.load import load
from tests.convert import tiny

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>"]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A tiny model whose tokenizer begins texts as Llama 3's does."""
    letters = [*"abcdefghijklmnopqrstuvwxyz?!", "Ċ", "Ġ"]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(SPECIAL)
    begin = tokenizer.token_to_id(SPECIAL[0])
    template = processors.TemplateProcessing(
        single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], begin)]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    folder = tiny.write_folder(tmp_path_factory.mktemp("begin") / "model", tiny.MODELS["llama3"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[1]}))
    return folder


def test_a_published_model_and_a_run_of_it_begin_as_published(published, tmp_path):
    importing.from_hf(published, tmp_path / "run", print, None)
    for folder in (published, tmp_path / "run"):
        model = load(str(folder), None, 1, print)
        (begin,) = model.begin
        assert begin == model.tokenizer.id_of(SPECIAL[0])
        assert model.encode("ab") == [begin, 0, 1]
        assert model.encode("ab", begin=False) == [0, 1]


def test_a_run_of_ours_begins_as_its_documents_do(published, tmp_path):
    (tmp_path / "text.txt").write_text("ab cd\n")
    (tmp_path / "chats.jsonl").write_text(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "ab?"},
                    {"role": "assistant", "content": "cd!"},
                ]
            }
        )
        + "\n"
    )
    given = {"tokenizer": str(published), "eos_token": SPECIAL[1], "holdout": 0.0}
    text, chats = tmp_path / "text", tmp_path / "chats"
    prepare(PrepareOptions(input=(str(tmp_path / "text.txt"),), output=str(text), **given))
    of_chats = {"input": (str(tmp_path / "chats.jsonl"),), "template": "llama3"}
    prepare_records(PrepareChatOptions(output=str(chats), **of_chats, **given))
    for folder, begins in ((text, False), (chats, True)):
        tokenizer = load_tokenizer(folder)
        cfg = replace(Config(), **{"data.path": str(folder)})
        found = begin_of_prompts(tmp_path / "run", cfg, tokenizer)
        assert found == (tokenizer.begin if begins else ()) and tokenizer.begin
