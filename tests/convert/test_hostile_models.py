"""Damaged files of published models: read, or refused with one short error, and never a traceback.

`tests/hostile.py` damages valid files with fixed seeds.
"""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.convert.hf import importing
from jaxpar.convert.hf.config import config_json, family_of, model_of
from jaxpar.convert.hf.config_file import read_config_json
from jaxpar.convert.hf.folder import INDEX_FILE, SINGLE_FILE
from jaxpar.convert.hf.tokenizer import NAMING_EOS, end_of_text
from jaxpar.convert.peft.importing import base_folder, lora_of, read_adapter_config
from jaxpar.convert.shape import model_from
from tests.convert import tiny
from tests.hostile import damaged
from tests.slow import slow, slow_but
from tests.tiny import TINY

PUBLISHED = Path(__file__).parent / "published"
NAMES = sorted(json.loads((PUBLISHED / "sources.json").read_text()))


def refused_or_read(call, name: str) -> ConfigError | None:
    """Run a reader, which may refuse a file in at most four lines."""
    try:
        call()
    except ConfigError as error:
        text = str(error)
        assert text.count("\n") < 4 and len(text) < 3_000, name
        assert error.fix, name
        return error
    except BaseException as error:
        raise AssertionError(f"{name}: {error!r}") from error
    return None


@pytest.mark.parametrize("name", slow_but(NAMES[::6], NAMES))
def test_config_files(name, tmp_path, capsys):
    """As `from-hf` and `--model.from` read them, and as an export writes them again."""
    refused = 0
    for saved in ("", "saved"):
        document = json.loads((PUBLISHED / name / saved / "config.json").read_text())
        for case, text in damaged(document, seed=NAMES.index(name), count=15):
            (tmp_path / "config.json").write_bytes(text)

            def read() -> None:
                values = read_config_json(tmp_path)
                family = family_of(values)
                model = model_of(values, family)
                importing.config_for(model, values)
                config_json(model, family, values, "float32")

            refused += refused_or_read(read, case) is not None
            shape = lambda: model_from(str(tmp_path), None, TINY.model)  # noqa: E731
            refused_or_read(shape, case)
    capsys.readouterr()
    assert refused > 2


@pytest.mark.parametrize(
    "name", ["llama3_2", *map(slow, ["qwen3_moe", "nemotron_3"]), "gpt_oss", slow("gemma4")]
)
def test_headers_indexes_and_configs_of_folders(name, tmp_path):
    folder = tiny.write_folder(tmp_path / "m", tiny.MODELS[name])
    single, config = folder / SINGLE_FILE, folder / "config.json"
    whole, values = single.read_bytes(), config.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    seed = len(name)
    for case, text in damaged(json.loads(values), seed, 25):
        config.write_bytes(text)
        refused_or_read(lambda: importing.open_source(folder), f"config {case}")
    config.write_bytes(values)
    for case, text in damaged(header, seed, 25):
        single.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
        refused_or_read(lambda: importing.open_source(folder), f"header {case}")
    single.write_bytes(whole)
    single.rename(folder / "a.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(header, "a.safetensors")}
    index["weight_map"].pop("__metadata__", None)
    for case, text in damaged(index, seed, 25):
        (folder / INDEX_FILE).write_bytes(text)
        refused_or_read(lambda: importing.open_source(folder), f"index {case}")


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt2", "gemma3_text"])
def test_files_of_tokenizers(name, tmp_path):
    documents = {file: {"eos_token": "</s>"} for file, _ in NAMING_EOS}
    documents |= {
        file: json.loads((PUBLISHED / name / file).read_text())
        for file in ("tokenizer_config.json", "config.json")
    }
    for file, document in documents.items():
        for case, text in damaged(document, len(name), 25):
            (tmp_path / file).write_bytes(text)
            refused_or_read(lambda: end_of_text(tmp_path, "m"), f"{file} {case}")
        (tmp_path / file).unlink()


def test_configs_of_adapters(tmp_path):
    document = {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": str(PUBLISHED / "llama"),
        "bias": "none",
        "init_lora_weights": True,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": 8,
        "rank_pattern": {},
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }
    for case, text in damaged(document, 7, 200):
        (tmp_path / "adapter_config.json").write_bytes(text)

        def read() -> None:
            values = read_adapter_config(tmp_path)
            lora_of(values, TINY.model)
            base_folder(values, None)

        refused_or_read(read, case)


@pytest.mark.slow
def test_the_command_ends_with_code_2(tmp_path):
    folder = tiny.write_folder(tmp_path / "m", tiny.MODELS["llama3_2"])
    document, refused = json.loads((folder / "config.json").read_text()), 0
    for case, text in damaged(document, 1, 40):
        (folder / "config.json").write_bytes(text)
        if refused_or_read(lambda: importing.open_source(folder), case) is None:
            continue
        with pytest.raises(ConfigError):
            call("convert", ["from-hf", str(folder), str(tmp_path / "run")])
        assert not (tmp_path / "run").exists()
        refused += 1
    assert refused > 10
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": [1]}')
    words = [sys.executable, "-m", "jaxpar.convert", "from-hf", str(folder), str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) <= 4, done.stderr
