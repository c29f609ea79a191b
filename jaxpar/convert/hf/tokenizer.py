"""The tokenizer of a run's weights: read from the run, and written for `transformers`."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from jaxpar.checkpoint.saved import CARRIED
from jaxpar.config import Config, ConfigError
from jaxpar.config.json_reader import read_json_object
from jaxpar.convert.hf import chat_format
from jaxpar.convert.hf.chat_format import (
    GENERATION_CONFIG,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    is_imported,
    learned_template,
)
from jaxpar.convert.hf.config_file import CONFIG_FILE
from jaxpar.convert.hf.folder import TOKENIZER_FILES
from jaxpar.data.formats.meta import TOKENIZER_FILE
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.sources import tokenizer_folder
from jaxpar.data.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer, read_tokenizer_json

#: The files that name the end of text, and the key in each, the first that does counting.
NAMING_EOS = (
    (TOKENIZER_CONFIG, "eos_token"),
    ("special_tokens_map.json", "eos_token"),
    (CONFIG_FILE, "eos_token_id"),
)


def write(run_dir: Path, cfg: Config, folder: Path, log: Callable[[str], None]) -> dict[str, Any]:
    """Write the tokenizer of a run's data, its chat template, and generation_config.json.

    Nothing that came with published weights, and is in the folder already, is lost.

    Args:     log: called if the data is missing; the folder then gets no tokenizer.
    Returns:  keys of config.json: the ids of special tokens.
    """
    kept = (folder / TOKENIZER_FILE).is_file()
    try:
        tokenizer = load_tokenizer(tokenizer_folder(cfg))
        begin = begin_of_prompts(run_dir, cfg, tokenizer)
    except ConfigError as error:
        if kept:
            return {}
        log(f"no tokenizer: {error}")
        return {"bos_token_id": None, "eos_token_id": None}
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": int(tokenizer.eos_id)}
    if kept and not _is_that_of(tokenizer, folder):
        log(f"the tokenizer is that of {tokenizer_folder(cfg)}, not that of the initial weights")
        for name in TOKENIZER_FILES:
            (folder / name).unlink(missing_ok=True)
        kept = False
    if not kept:
        ids |= _write_tokenizer(tokenizer, begin, cfg.data.seq_len, folder)
    _write_chat(learned_template(run_dir, cfg), tokenizer, ids, folder, log)
    return {} if kept else ids


def _is_that_of(tokenizer: Tokenizer, folder: Path) -> bool:
    text = (folder / TOKENIZER_FILE).read_bytes()
    return hashlib.sha256(text).hexdigest() == tokenizer.fingerprint


def _write_tokenizer(
    tokenizer: Tokenizer, begin: tuple[int, ...], length: int, folder: Path
) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json. Returns the ids of special tokens."""
    tokenizer.save(folder)
    if not (folder / TOKENIZER_FILE).is_file():
        as_json(tokenizer).save(str(folder / TOKENIZER_FILE))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.eos_token,
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
    }
    if begin:
        about["bos_token"] = tokenizer.decode(begin[-1:])
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(about, indent=2) + "\n")
    return {"bos_token_id": begin[-1]} if begin else {}


def _write_chat(
    name: str, tokenizer: Tokenizer, ids: dict[str, Any], folder: Path, log: Callable[[str], None]
) -> None:
    """Add the ends and the template of the conversations that a run has learned to its folder.

    Args:     name: of the template of `prepare-chat`; empty without conversations. ids: of special
              tokens.
    """
    learned = chat_format.of_data(name, tokenizer)
    file = folder / GENERATION_CONFIG
    about = read_json_object(file) if file.is_file() else ids
    before = about.get("eos_token_id")
    ends = before if isinstance(before, list) else [] if before is None else [before]
    # The end of a turn first, as in published models.
    ends = [*sorted(learned.ends - {*ends, ids["eos_token_id"]}), *ends]
    ends += [] if ids["eos_token_id"] in ends else [ids["eos_token_id"]]
    about = about | {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    file.write_text(json.dumps(about, indent=2) + "\n")
    if learned.template is None:
        return
    if chat_format.carried_template(folder) is None:
        (folder / TEMPLATE_FILE).write_text(learned.template, "utf-8")
    else:
        log(f"chat template of the initial weights; trained with --template {name}")


def tokenizer_of_run(run_dir: str | Path, cfg: Config) -> Tokenizer:
    """Load the tokenizer of a run: that of its data, or the one imported with its weights.

    Raises:   ConfigError when it is missing, or its end of text is unknown.
    """
    kept = Path(run_dir) / CARRIED
    if is_imported(run_dir, cfg):
        return tokenizer_in(kept, str(run_dir))
    try:
        return load_tokenizer(tokenizer_folder(cfg))
    except ConfigError:
        if not (kept / TOKENIZER_FILE).is_file():
            raise
    return tokenizer_in(kept, str(run_dir))


def begin_of_prompts(run_dir: str | Path, cfg: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids to put before a prompt: those before the texts that the model was trained on.

    For an imported run, these are the tokenizer's. For any other run, they are the same if its
    documents begin with them, or else none.

    Raises:   ConfigError when the documents cannot be read.
    """
    if not tokenizer.begin or is_imported(run_dir, cfg):
        return tokenizer.begin
    try:
        documents = TokenDataset.open(tokenizer_folder(cfg))
    except ConfigError:
        if (Path(run_dir) / CARRIED).is_dir():
            return tokenizer.begin
        raise
    return tokenizer.begin if documents.begins_with(tokenizer.begin) else ()


def tokenizer_in(folder: Path, named: str) -> Tokenizer:
    """Load the tokenizer of a published folder.

    Args:     named: the user's name of the model, for errors.
    Raises:   ConfigError as `tokenizer_of_run`.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        rule = f"has no {TOKENIZER_FILE}"
        raise ConfigError("RUN", named, rule, f"copy that of the model to {folder}")
    eos = end_of_text(folder, named)
    try:
        return read_tokenizer_json(folder / TOKENIZER_FILE, eos)
    except ConfigError as error:  # its fix names options of `python -m jaxpar.data prepare`
        fix = f"copy that of the model to {folder}, with its eos_token in {TOKENIZER_CONFIG}"
        raise ConfigError("RUN", named, f"its {TOKENIZER_FILE} {error.rule}", fix) from error


def end_of_text(folder: Path, named: str) -> str | int | None:
    """Return the end of text that a published folder names, as its text or its id.

    tokenizer_config.json comes first, then the older special_tokens_map.json, then the id in
    config.json, for files of which the others say nothing (GPT-2).

    Args:     named: the user's name of the model, for errors.
    Returns:  None if no file names one.
    Raises:   ConfigError that names the file that cannot be read.
    """
    for name, key in NAMING_EOS:
        if not (folder / name).is_file():
            continue
        try:
            # `transformers` writes int(1e30) for a maximum length that is not known.
            about = read_json_object(folder / name, what="it", max_digits=40, constants=True)
            eos = about.get(key)
            eos = eos["content"] if isinstance(eos, dict) else eos
            if not isinstance(eos, str | None) and name != CONFIG_FILE:
                raise TypeError(f"{key} is {str(eos)[:80]!r}")
        except (OSError, ValueError, TypeError, KeyError) as error:
            rule = f"has a {name} that cannot be read ({error})"
            raise ConfigError("RUN", named, rule, f"copy that of the model to {folder}") from error
        if isinstance(eos, list) and len(eos) == 1:
            (eos,) = eos
        if isinstance(eos, str) or (type(eos) is int and name == CONFIG_FILE):
            return eos
    return None


def as_json(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer as in an export: the names of special tokens in a text are tokens."""
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.parsing_special_tokens()
    return bytes_as_json(tokenizer)


def bytes_as_json(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Convert the byte tokenizer to a tokenizer.json: a BPE of 256 bytes without merges."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    found.decoder = tokenizers.decoders.ByteLevel()
    found.add_special_tokens([tokenizer.eos_token])
    assert found.token_to_id(tokenizer.eos_token) == tokenizer.eos_id
    return found


def _byte_characters() -> list[str]:
    """Return the character for each byte in a byte-level BPE.

    Source:   Radford et al. 2019, `bytes_to_unicode` of GPT-2's encoder: printable bytes stand for
              themselves, the others for the characters from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
