"""Commands that take a published model also take its name on the Hugging Face Hub."""

import dataclasses

import pytest
from tokenizers import Tokenizer, models

from jaxpar.checkpoint import weights_alone
from jaxpar.checkpoint.saved import CARRIED, METADATA
from jaxpar.config import ConfigError, RunConfig
from jaxpar.convert.hf import importing
from jaxpar.convert.peft.importing import base_folder
from jaxpar.data.tokenizer import open_tokenizer
from jaxpar.inference.load import load
from tests.convert import tiny
from tests.hub import COMMIT, connect, files_in, serving
from tests.weights import origin_of

NAME = f"org/model@{COMMIT}"


@pytest.fixture
def on_the_hub(tmp_path, monkeypatch):
    """A tiny Llama with a tokenizer, as "org/model", and nothing of that name on this host."""
    folder = tiny.write_folder(tmp_path / "source", tiny.MODELS["llama3"])
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 2}, unk_token="a"))
    words.add_special_tokens(["</s>"])
    words.save(str(folder / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    with serving(files_in(folder)) as server:
        connect(monkeypatch, server.url, tmp_path / "cache")
        yield folder


def test_from_hf_records_the_commit(on_the_hub, tmp_path):
    said = []
    source = importing.from_hf("org/model", tmp_path / "run", said.append, None)
    assert source.name == NAME
    saved = tmp_path / "run" / "checkpoints" / str(weights_alone.STEP)
    assert NAME in (saved / METADATA).read_text()
    assert (tmp_path / "run" / CARRIED / "tokenizer.json").is_file()


def test_a_run_starts_from_it(on_the_hub):
    model = importing.open_source(on_the_hub).config
    cfg = dataclasses.replace(model, run=RunConfig(init_from="org/model@v1"))
    found = origin_of(cfg)
    assert found is not None
    assert str(found) == NAME
    with pytest.raises(ConfigError, match=r"run.init_from = 'org/none': .* does not exist"):
        origin_of(dataclasses.replace(cfg, run=RunConfig(init_from="org/none")))


def test_text_is_generated_and_encoded_with_it(on_the_hub):
    assert load("org/model", None, 1, print).tokenizer.vocab_size == 3
    tokenizer = open_tokenizer("org/model")
    assert tokenizer.fingerprint == open_tokenizer(str(on_the_hub)).fingerprint
    with pytest.raises(ConfigError, match=r"--tokenizer = 'org/none'"):
        open_tokenizer("org/none")


def test_adapters_name_their_base_model(on_the_hub):
    assert base_folder({"base_model_name_or_path": "org/model"}, None) == "org/model"
    with pytest.raises(ConfigError, match="is not the folder of a published model"):
        base_folder({"base_model_name_or_path": "model"}, None)
