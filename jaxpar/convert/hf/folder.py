"""Finds and checks the tensors in the folder of a published model, before any is read."""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.config.json_reader import read_json_object
from jaxpar.convert.hf import float8_blocks, mxfp4
from jaxpar.convert.hf.tensor_layout import Entry, tensor_names, tensor_shape
from jaxpar.convert.safetensors_file import AGAIN, DTYPES, NAMES, Stored, create_file, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

#: Files of a tokenizer, and of its chat template.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)

#: Files that are copied along with the weights, on import and export.
CARRIED_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)

#: Files that can only be unpickled, which may run arbitrary code.
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

#: Tensors that are not weights: rotary frequencies and causal masks, in files of 2023 and before.
DERIVED = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    r"|(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
    r"|gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)"
)

#: Tensors that are float32 beside weights of 16 bits: a rounded bias would choose other experts.
FLOAT32 = re.compile(r".*\.e_score_correction_bias")

#: Maximum number of names in an error.
SHOWN = 3


class Readable(Protocol):
    """A tensor that can be read: of a file, or a part of one."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...
    def open(self) -> np.ndarray: ...


class Tensors:
    """The tensors of a folder by name. Each is opened as a memory map.

    A quantized one is dequantized in memory, and kept until another one is: boxes of it are read.
    """

    def __init__(self, stored: Mapping[str, Readable]):
        self.stored = stored
        self.last: tuple[str, np.ndarray] | None = None

    def open(self, name: str) -> np.ndarray:
        """Open a tensor, read-only."""
        if isinstance(self.stored[name], Stored):
            return self.stored[name].open()
        if self.last is None or self.last[0] != name:
            self.last = None
            self.last = name, self.stored[name].open()
        return self.last[1]

    def dtype(self) -> str:
        """Return the dtype of the tensors; float32 if it is mixed, which represents all values.

        Those of FLOAT32 do not count.
        """
        there = {s.dtype for name, s in self.stored.items() if not FLOAT32.fullmatch(name)}
        same = [name for name, code in NAMES.items() if there == {code}]
        return same[0] if same else "float32"


def find_tensors(folder: Path, prefix: str = "") -> Tensors:
    """Find all tensors with weights in a folder, from the headers of its files.

    Args:     prefix: of all names but the head's; added if no tensor of the files has it.
    Raises:   ConfigError that names the file that is missing, truncated or a pickle, or the tensor
              that is not in the file given by the index.
    """
    if (folder / INDEX_FILE).is_file():
        return Tensors(_with_prefix(_weights_of(_indexed(folder)), prefix))
    if (folder / SINGLE_FILE).is_file():
        return Tensors(_with_prefix(_weights_of(read_header(folder / SINGLE_FILE)), prefix))
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        rule = "is a pickle, which may run arbitrary code when it is read"
        fix = "use the model's .safetensors files"
        raise ConfigError("DIR", str(folder / pickles[0]), rule, fix)
    rule = f"contains neither {SINGLE_FILE} nor {INDEX_FILE}"
    raise ConfigError("DIR", str(folder), rule, "use the folder of a published model")


def _with_prefix(stored: Mapping[str, Readable], prefix: str) -> Mapping[str, Readable]:
    if any(name.startswith(prefix) for name in stored):
        return stored
    return {n if n.startswith("lm_head.") else prefix + n: where for n, where in stored.items()}


def _weights_of(stored: dict[str, Stored]) -> dict[str, Readable]:
    """Drop DERIVED tensors, which may be float32 although all weights have 16 bits."""
    weights = {n: where for n, where in stored.items() if not DERIVED.fullmatch(n)}
    by_blocks = float8_blocks.dequantized(weights)
    plain = {n: where for n, where in by_blocks.items() if isinstance(where, Stored)}
    quantized = {n: where for n, where in by_blocks.items() if n not in plain}
    return {**mxfp4.dequantized(plain), **quantized}


def _indexed(folder: Path) -> dict[str, Stored]:
    """Find the tensors of the files in an index."""
    path = folder / INDEX_FILE
    try:
        where = read_json_object(path)["weight_map"]
        wrong = [name for name in where.values() if not isinstance(name, str)]
        if wrong:
            raise TypeError(f"{wrong[0]!r} is not a file name")
        files = sorted(set(where.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(INDEX_FILE, str(path), f"is damaged ({error!r})", AGAIN) from error
    found: dict[str, Stored] = {}
    for name in files:
        file = folder / name
        if Path(name).name != name or not file.is_file():
            raise ConfigError(INDEX_FILE, name, "is not in the folder", "download that file, too")
        for tensor, stored in read_header(file).items():
            if where.get(tensor) != name:
                rule = f"is in {name}, but {INDEX_FILE} says {where.get(tensor)}"
                fix = f"use {INDEX_FILE} and all files of one revision of the model"
                raise ConfigError(tensor, list(stored.shape), rule, fix)
            found[tensor] = stored
    for tensor, name in where.items():
        if tensor not in found:
            rule = f"is not in {name}, contrary to {INDEX_FILE}"
            fix = f"use {INDEX_FILE} and all files of one revision of the model"
            raise ConfigError(tensor, None, rule, fix)
    return found


def check_tensors(tensors: Tensors, entries: Iterable[Entry], by: str = "config.json") -> None:
    """Check that a folder contains exactly the tensors of the entries, with their shapes.

    Args:     by: what describes the model, for messages.
    Raises:   ConfigError that names the first tensors that are missing, extra or of another shape.
    """
    entries = list(entries)
    there = {name: s.shape for name, s in tensors.stored.items()}
    wanted: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        wanted |= dict.fromkeys(tensor_names(entry), tensor_shape(entry))
    missing = [name for name in wanted if name not in there]
    extra = [name for name in there if name not in wanted]
    if missing:
        rule = "is missing from the model's files"
        rule += f", which have {_some(extra)} that {by} does not describe" if extra else ""
        fix = f"use the {by} that was published with these files"
        fix += ", with published names of tensors" if extra else ", or files with all tensors"
        raise ConfigError(_some(missing), None, rule, fix)
    if extra in (["lm_head.weight"], ["embed_out.weight"]):
        embed = [entry.name for entry in entries if entry.path == "embed"]
        if "head" not in {entry.path for entry in entries} and embed:
            _check_tied(tensors, extra[0], embed[0])
            extra = []
    if extra:
        rule = f"belongs to no parameter of the model that {by} describes"
        fix = f"use the {by} that was published with these files"
        raise ConfigError(_some(extra), list(there[extra[0]]), rule, fix)
    for name, shape in wanted.items():
        if there[name] != shape:
            rule = f"must be of shape {list(shape)} according to {by}"
            raise ConfigError(name, list(there[name]), rule, f"use the {by} of these files")


def _check_tied(tensors: Tensors, name: str, embedding: str) -> None:
    """Check that the head of a tied model, if it is in the files, equals the embedding."""
    head, embed = tensors.open(name), tensors.open(embedding)
    if head.shape != embed.shape or not all(map(np.array_equal, head, embed)):
        rule = "must be the embedding: config.json has tie_word_embeddings"
        fix = "set tie_word_embeddings to false in config.json if the head is separate"
        raise ConfigError(name, list(head.shape), rule, fix)


def _some(names: list[str]) -> str:
    """List the first names, and the number of others."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def create_tensors(
    folder: Path, shapes: dict[str, tuple[int, ...]], dtype: str, shard_bytes: int
) -> dict[str, Stored]:
    """Create files with space for tensors: one, or several and an index beyond `shard_bytes`.

    Args:     shapes: shape of each tensor, in the order of the file. dtype: of all tensors but
              those of FLOAT32.
    """
    dtypes = {name: "float32" if FLOAT32.fullmatch(name) else dtype for name in shapes}
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    size = total = 0
    for name, shape in shapes.items():
        item = DTYPES[NAMES[dtypes[name]]].itemsize
        num_bytes = int(np.prod(shape, dtype=np.int64)) * item
        if parts[-1] and size + num_bytes > shard_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = shape
        size, total = size + num_bytes, total + num_bytes
    if len(parts) == 1:
        return create_file(folder / SINGLE_FILE, parts[0], dtypes)
    stored: dict[str, Stored] = {}
    for i, part in enumerate(parts, 1):
        file = folder / f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        stored |= create_file(file, part, dtypes)
    where = {name: s.file.name for name, s in stored.items()}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return stored


# --------------- The files that come with published weights: config, tokenizer, generation settings


def copy_carried(folder: Path, to: Path) -> None:
    """Copy the files that come with weights: config, tokenizer, generation settings."""
    to.mkdir(exist_ok=True)
    for name in CARRIED_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)
