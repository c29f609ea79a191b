"""Options of `python -m jaxpar.data`."""

import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from jaxpar.config.errors import ConfigError
from jaxpar.config.options import TO_ADDRESS, Argument, Range, Written
from jaxpar.config.rules.limits import TOKEN_ID

#: Default share of the documents to hold out.
HOLDOUT = 0.02


def _name_of(inputs: tuple[str, ...]) -> str:
    """Return the name of the only input, without its folder and its endings."""
    last = inputs[0].removeprefix("hf:").rstrip("/").rpartition("/")[2] if len(inputs) == 1 else ""
    if name := last.partition(":")[0].partition(".")[0]:
        return name
    raise ConfigError("--output", "", "is missing", "use --output data/NAME")


@dataclass(frozen=True, kw_only=True)
class _OutputOptions:
    """The folder to write, and its splits."""

    output: Annotated[str, TO_ADDRESS] = ""
    """Folder to write, or s3://BUCKET/PREFIX. It appears only when it is complete. Empty: data/ and
    the name of the input."""
    overwrite: bool = False
    """Replace an existing dataset in the output folder."""
    holdout: float = HOLDOUT
    """Share of the documents, selected by a hash of their text, to hold out for evaluation."""
    split: Annotated[tuple[float, ...] | None, Written("A,B,C", example="98,1,1")] = None
    """Sizes of the training, held-out and test split, such as 98,1,1, in place of --holdout."""
    eos_token: str | None = None
    """End-of-text token of a tokenizer.json. None: that of its tokenizer_config.json, or a special
    token with a usual name."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Whether a row that is broken, or is not what the command reads, ends it, or is left out and
    counted."""
    workers: Annotated[int, Range(1, 4096, os.cpu_count() or 1)] = os.cpu_count() or 1
    """Number of processes that encode."""
    parts: Annotated[int, Range(0, 99_999, 64)] = 0
    """Number of parts to write. 0: one for each 8 GiB of input."""
    part: Annotated[int | None, Range(0, 99_998, 0)] = None
    """Write only this part, from 0, as one task of an array of jobs with --parts, which share the
    output's folder, or its address. The last task to finish completes the dataset. None: all that
    are missing."""
    engine: Literal["processes", "ray"] = "processes"
    """Where parts are written: in processes of this host, or on a Ray cluster that shares the
    output's folder or address (pip install 'jaxpar[ray]')."""

    def __post_init__(self) -> None:
        given: Any = self  # each kind declares its inputs
        if not self.output:
            object.__setattr__(self, "output", f"data/{_name_of(given.input)}")


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(_OutputOptions):
    """Tokenize text into a dataset folder."""

    input: Annotated[tuple[str, ...], TO_ADDRESS]
    """Text files (see docs/data.md), folders of them, s3:// addresses of these, a dataset of the
    Hugging Face Hub, hf:ORG/NAME or hf:ORG/NAME:SPLIT, or `stdlib`: the source code of Python."""
    extension: tuple[str, ...] = ()
    """Endings of the files to read in folders, as text, such as .py .md; any: every file that is
    UTF-8 text. None: the formats of docs/data.md."""
    tokenizer: str = "bytes"
    """bytes; bpe:N to train a BPE of N tokens on the input; a tokenizer.json; or a model of the
    Hugging Face Hub, org/model or org/model@revision."""
    tokenizer_sample: Annotated[int, Range(1, 1 << 40, 10_000_000)] = 10_000_000
    """Characters of text that bpe:N is trained on, about a million from each file."""
    text_field: str = "text"
    """JSON field or Parquet column with the text."""
    separator: str | None = None
    r"""Text between documents in a .txt file; \n in it matches a newline, \n or \r\n, in the file.
    None: each file is a document."""
    stream: bool = False
    """Write an index of the text in place of tokens. Training tokenizes the text, which must stay
    where it is."""


@dataclass(frozen=True, kw_only=True)
class _RecordOptions(_OutputOptions):
    """Files of conversations, and how they become text."""

    input: Annotated[tuple[str, ...], TO_ADDRESS]
    """Files of JSON Lines, compressed or not, or folders of them; or as those of `prepare`."""
    tokenizer: str
    """The model's tokenizer.json or its folder, or bytes."""
    template: Literal["plain", "chatml", "llama3"] = "plain"
    """Layout of a conversation: chatml for Qwen, llama3 for Llama 3, plain for others."""


@dataclass(frozen=True, kw_only=True)
class PrepareChatOptions(_RecordOptions):
    """Tokenize conversations into a dataset folder. The loss uses only the assistant's tokens."""

    messages_field: str = "messages"
    """JSON field with a list of {"role": ..., "content": ...}."""


@dataclass(frozen=True, kw_only=True)
class PreparePairsOptions(_RecordOptions):
    """Tokenize pairs of a chosen and a rejected response."""

    prompt_field: str = "prompt"
    """JSON field of the prompt: a text, or a list of {"role": ..., "content": ...}. Without it, the
    prompt is what both responses begin with."""
    chosen_field: str = "chosen"
    """JSON field of the preferred response: a text, or messages, with the prompt or without."""
    rejected_field: str = "rejected"
    """JSON field of the other response."""


@dataclass(frozen=True, kw_only=True)
class ReframeOptions:
    """Copy text into .jsonl.zst files of small frames, for `prepare --stream`."""

    input: tuple[str, ...]
    """Files of JSON Lines, compressed or not, .parquet, .arrow or .tar, or folders of them."""
    output: str
    """Folder for the copies. Each appears when it is complete."""
    text_field: str = "text"
    """Parquet or Arrow column with the text. Lines of JSON are copied as they are."""
    level: Annotated[int, Range(1, 19, 3)] = 3
    """Compression level of Zstandard."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Whether a row without text ends the command, or is left out and counted. Lines of JSON are
    not parsed."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Write tokens in another format. Several inputs are concatenated."""

    input: tuple[str, ...]
    """Paths as for `data.path`, and MDS folders and .tar files of tokens."""
    output: Annotated[str, TO_ADDRESS]
    """jaxpar: a folder, or s3://BUCKET/PREFIX. manifest: a folder. megatron: a prefix, without .bin
    and .idx. Others: a file."""
    to: Literal["jaxpar", "manifest", "megatron", "nanogpt", "llmc"]
    """Format to write. manifest: a folder that names the files of prepared folders, which stay
    where they are, as its parts."""
    split: Literal["train", "val", "test"] = "train"
    """Split of the input folders to read."""
    held_out: tuple[str, ...] = ()
    """Files of held-out tokens, for the val split of a jaxpar folder."""
    eos_id: Annotated[int | None, TOKEN_ID] = None
    """End-of-text token, for inputs that do not mark documents. None: the tokenizer's."""
    dtype: Literal["uint8", "uint16", "uint32", "int64"] | None = None
    """Dtype of tokens in inputs that do not tell it. None: as docs/data.md says."""
    tokenizer: str | None = None
    """Tokenizer of the tokens: a tokenizer.json, or bytes. A jaxpar folder stores it."""
    overwrite: bool = False
    """Replace an existing output."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Check and describe a folder or file of tokens. Reads all of it."""

    path: Annotated[str, Argument("PATH"), TO_ADDRESS]
    """A path as for `data.path` or `convert`: a dataset folder or its address, or token files."""
    eos_id: Annotated[int | None, TOKEN_ID] = None
    """End-of-text token, for files that do not mark documents."""
    dtype: Literal["uint8", "uint16", "uint32", "int64"] | None = None
    """Dtype of tokens in files that do not tell it. None: as docs/data.md says."""
    tokenizer: str | None = None
    """The tokenizer.json to decode the first text with, for tokens without a tokenizer."""


type Options = (
    PrepareOptions
    | PrepareChatOptions
    | PreparePairsOptions
    | ReframeOptions
    | ConvertOptions
    | InspectOptions
)
