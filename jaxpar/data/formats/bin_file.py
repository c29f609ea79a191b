"""Single `.bin` token files: nanoGPT's, without a header, and llm.c's, with one.

nanoGPT's files are uint16. llm.c's start with 256 int32: magic, version, number of tokens, zeros;
the magic distinguishes uint16 (GPT-2) from uint32 (Llama 3). Both are little-endian.

Source:   `data/*/prepare.py` of nanoGPT; `dev/data/data_common.py` of llm.c.
"""

from pathlib import Path

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.token_file import Hints, TokenFile, tokens_of

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS

#: Version and dtype of llm.c's tokens, by magic.
LLMC = {20240520: (1, "<u2"), 20240801: (7, "<u4")}

#: The magics of all llm.c files are dates, followed by a small version.
DATES, VERSIONS = range(2024_01_01, 2030_01_01), range(1, 100)

#: The count in llm.c's header is an int32.
MAX_LLMC_TOKENS = 2**31 - 1

#: Endings of the file names that Megatron's preprocessing writes.
MEGATRON_NAMES = ("_document.bin", "_sentence.bin")


def find(path: Path) -> Path | None:
    """Return a path if it is a .bin file; None otherwise."""
    return path if path.suffix == ".bin" and path.is_file() else None


def find_llmc(path: Path) -> Path | None:
    """Return a path if it is a .bin file with a header of llm.c's; None otherwise."""
    return path if find(path) and _is_llmc(_head(path)) else None


def _head(path: Path) -> np.ndarray:
    return np.fromfile(path, "<i4", count=min(HEADER_INTS, path.stat().st_size // 4))


def _is_llmc(head: np.ndarray) -> bool:
    of_llmc = head.size > 1 and head[0] in DATES and head[1] in VERSIONS
    return bool(of_llmc or (head.size and head[0] in LLMC))


def read_nanogpt(path: Path, hints: Hints) -> TokenFile:
    """Open a .bin file without a header.

    Raises:   ConfigError("data.path", ...) that names the file and the byte of the problem.
    """
    size, dtype = path.stat().st_size, np.dtype(hints.dtype or "uint16").newbyteorder("<")
    if size == 0:
        raise _broken(path, 0, "is empty")
    if path.name.endswith(MEGATRON_NAMES):
        fix = "put the .idx file next to it"
        raise _broken(path, 0, "is Megatron's by its name, but its .idx file is missing", fix)
    if size % dtype.itemsize:
        bits = 8 * dtype.itemsize
        odd = "odd" if bits == 16 else "no multiple of 4"
        rule = f"has {size:,} bytes, which is {odd} for {bits}-bit tokens"
        raise _broken(path, size - size % dtype.itemsize, rule)
    return TokenFile(path, tokens_of(path, dtype), None, guessed=True)


def read_llmc(path: Path, hints: Hints) -> TokenFile:
    """Open a file of llm.c, and check its header against its size.

    Raises:   ConfigError("data.path", ...) that names the file and the byte of the problem.
    """
    size, head = path.stat().st_size, _head(path)
    magic = int(head[0])
    if magic not in LLMC:
        known = " and ".join(map(str, LLMC))
        rule = f"starts with {magic}, but llm.c's tokens start with {known}"
        raise _broken(path, 0, rule, "use a token file")
    if len(head) < HEADER_INTS:
        raise _broken(path, size, f"ends inside llm.c's header of {HEADER_BYTES} bytes")
    version, name = LLMC[magic]
    dtype, found, count = np.dtype(name), int(head[1]), int(head[2])
    if found != version:
        raise _broken(path, 4, f"has version {found} of llm.c's format {magic}, not {version}")
    if count <= 0:
        raise _broken(path, 8, f"records {count} tokens")
    expected = HEADER_BYTES + count * dtype.itemsize
    if size != expected:
        rule = f"has {size:,} bytes, but its header records {count:,} tokens, {expected:,} bytes"
        raise _broken(path, min(size, expected), rule)
    return TokenFile(path, tokens_of(path, dtype, HEADER_BYTES), None)


def _broken(path: Path, at: int, rule: str, fix: str = "copy the file again") -> ConfigError:
    return ConfigError("data.path", str(path), f"{path}, byte {at:,}: {rule}", fix)


def llmc_header(vocab_size: int, num_tokens: int) -> tuple[bytes, np.dtype]:
    """Return the header of an llm.c token file, and the dtype of its tokens.

    Raises:   ConfigError("--to", ...) for more tokens than the header can record.
    """
    if num_tokens > MAX_LLMC_TOKENS:
        rule = f"allows at most {MAX_LLMC_TOKENS:,} tokens per file, but there are {num_tokens:,}"
        raise ConfigError("--to", "llmc", rule, "convert fewer inputs at a time")
    magic = 20240520 if vocab_size <= 1 << 16 else 20240801
    version, name = LLMC[magic]
    head = np.zeros(HEADER_INTS, "<i4")
    head[:3] = magic, version, num_tokens
    return head.tobytes(), np.dtype(name)


def nanogpt_header(vocab_size: int, num_tokens: int) -> tuple[bytes, np.dtype]:
    """Return nanoGPT's empty header, and the dtype of its tokens.

    Raises:   ConfigError("--to", ...) for a vocabulary of more than 16 bits.
    """
    if vocab_size > 1 << 16:
        rule = f"stores 16-bit tokens, but the vocabulary has {vocab_size:,}"
        raise ConfigError("--to", "nanogpt", rule, "use --to llmc, or --to megatron")
    return b"", np.dtype("<u2")
