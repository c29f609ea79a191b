"""Tokenizes parts of a streamed dataset, and checks that the tokens are those of the index."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.stream.index import StreamIndex, check_of, read_index
from jaxpar.data.stream.recent import Recent
from jaxpar.data.stream.texts import Texts, UnreadableText
from jaxpar.data.tokenizer import load_tokenizer

#: Tokens that an encoder keeps, with 4 bytes each.
KEPT_TOKENS = 4 << 20


class PartEncoder:
    """Tokenizes parts of a dataset. The most recent ones are kept."""

    def __init__(self, folder: str | Path):
        """Load the index and the tokenizer of a dataset folder. Raises: ConfigError."""
        self._index = read_index(Path(folder))
        self._tokenizer = load_tokenizer(folder)
        self._texts = Texts(self._index)
        self._kept = Recent[np.ndarray](KEPT_TOKENS)

    def encode(self, parts: np.ndarray) -> list[np.ndarray]:
        """Return the tokens of each part: int32 [tokens].

        Args:     parts: PART [parts].
        Raises:   ConfigError("data.path", ...) if a text, or its tokens, are not those of the
                  index; OSError if a file cannot be read.
        """
        keys = [part.tobytes() for part in parts]
        found = [self._kept.get(key) for key in keys]
        missing = [i for i, ids in enumerate(found) if ids is None]
        for i, ids in zip(missing, self._encode(parts[missing]), strict=True):
            found[i] = self._kept.keep(keys[i], ids, len(ids))
        return [ids for ids in found if ids is not None]

    def _encode(self, parts: np.ndarray) -> Sequence[np.ndarray]:
        order = np.lexsort((parts["start"], parts["file"]))  # neighbors share a frame
        texts = [""] * len(parts)
        for i in order:
            try:
                texts[i] = self._texts.text(parts[i])
            except UnreadableText as error:
                raise _changed(self._index, parts[i], str(error)) from error
        encoded = self._tokenizer.encode_batch(texts)
        for part, ids in zip(parts, encoded, strict=True):
            if check_of(part, ids) != part["check"]:
                raise _changed(self._index, part, "its text has other tokens")
        return encoded


def _changed(index: StreamIndex, part: np.ndarray, why: str) -> ConfigError:
    path = index.files[int(part["file"])].path if part["file"] < len(index.files) else "a file"
    rule = f"is an index of {path}, which has changed since at {part['start']:,} ({why})"
    fix = f"restore it, or index again: prepare --stream --output {index.folder} --overwrite"
    return ConfigError("data.path", str(index.folder), rule, fix)
