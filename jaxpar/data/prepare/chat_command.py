"""Prepare a dataset of conversations: `python -m jaxpar.data prepare-chat`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from jaxpar.config import ConfigError
from jaxpar.data.formats.meta import TRAIN, Meta
from jaxpar.data.formats.readers import json_records, read_jsonl
from jaxpar.data.formats.writer import SplitWriter, whole_folder, write_meta
from jaxpar.data.prepare.chat import ChatEncoder, check_messages
from jaxpar.data.prepare.documents import InputFile, find_sources
from jaxpar.data.prepare.progress import PreparationProgress
from jaxpar.data.prepare.splits import HOLDOUT, check_no_split_is_empty, shares_of, split_of
from jaxpar.data.tokenizer import Tokenizer, open_tokenizer
from jaxpar.runtime.option_classes import TO_ADDRESS


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Tokenize conversations into a dataset folder. The loss uses only the assistant's tokens."""

    input: tuple[str, ...]
    """Files (.jsonl, .jsonl.gz, .jsonl.zst) with a conversation per line, or folders of them."""
    output: Annotated[str, TO_ADDRESS]
    """Folder to write, or s3://BUCKET/PREFIX. It appears only when it is complete."""
    tokenizer: str
    """The model's tokenizer.json or its folder, or bytes."""
    template: Literal["plain", "chatml", "llama3"] = "plain"
    """Layout of a conversation: chatml for Qwen, llama3 for Llama 3, plain for others."""
    messages_field: str = "messages"
    """JSON field with a list of {"role": ..., "content": ...}."""
    holdout: float = HOLDOUT
    """Share of the conversations, selected by a hash of their text, to hold out for evaluation."""
    split: str = ""
    """Sizes of the training, held-out and test split, such as 98,1,1, in place of --holdout."""
    eos_token: str | None = None
    """End-of-text token of a tokenizer.json. None: try the usual names."""
    overwrite: bool = False
    """Replace an existing dataset in the output folder."""


def prepare_chat(options: ChatOptions, progress: PreparationProgress | None = None) -> Meta:
    """Write a dataset folder of conversations, each as a document.

    Returns:  the contents of its meta.json.
    Raises:   ConfigError that names an option, or an unusable file and line.
    """
    shares_of(options.holdout, options.split)
    sources = find_jsonl(options.input, "chat data")
    tokenizer = open_tokenizer(options.tokenizer, options.eos_token)
    encoder = ChatEncoder(options.template, tokenizer)
    with whole_folder(options.output, options.overwrite) as folder:
        return _write(
            folder, options, sources, encoder, tokenizer, progress or PreparationProgress()
        )


def find_jsonl(inputs: Sequence[str], what: str) -> list[InputFile]:
    """Find the files of the option --input.

    Raises:   ConfigError if there is none, or if one is not JSON Lines, which `what` must be.
    """
    if not inputs:
        raise ConfigError("--input", "", "must not be empty", "use .jsonl files")
    sources = find_sources(inputs)
    for source in sources:
        if source.read is not read_jsonl:
            rule = f"is not JSON Lines, which {what} must be"
            raise ConfigError("--input", str(source.path), rule, "use .jsonl files")
    return sources


def _write(
    folder: Path,
    options: ChatOptions,
    sources: Sequence[InputFile],
    encoder: ChatEncoder,
    tokenizer: Tokenizer,
    progress: PreparationProgress,
) -> Meta:
    vocab_size, eos_id = tokenizer.vocab_size, tokenizer.eos_id
    shares = shares_of(options.holdout, options.split)
    writers = {split: SplitWriter(folder, split, vocab_size, eos_id) for split in shares.splits}
    total, before = sum(source.num_bytes for source in sources), 0
    for source in sources:
        with source.path.open("rb") as file:
            for where, record in json_records(file, source.path):
                messages = check_messages(record, options.messages_field, where)
                split = split_of(json.dumps(messages), shares)
                writers[split].append_conversation(*encoder.encode(messages))
                num_tokens = sum(writer.num_tokens for writer in writers.values())
                progress.advance(before + file.tell(), total, num_tokens)
        before += source.num_bytes
    splits = {split: writer.close() for split, writer in writers.items()}
    fix = "use more conversations"
    check_no_split_is_empty(splits, shares, options.holdout, options.split, fix)
    about = {"template": options.template}
    return write_meta(folder, tokenizer, writers[TRAIN], splits, options.input, *shares, **about)
