"""Single `.bin` token files: nanoGPT's, without a header, and llm.c's, with one.

nanoGPT's files are uint16. llm.c's start with 256 int32: magic, version, number of tokens, zeros;
the magic distinguishes uint16 (GPT-2) from uint32 (Llama 3). Both are little-endian.

Source:   `data/*/prepare.py` of nanoGPT; `dev/data/data_common.py` of llm.c.
"""

from pathlib import Path

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.token_file import TokenFile

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


def read(path: Path) -> TokenFile:
    """Open a .bin file, and check its header against its size.

    Raises:   ConfigError("data.path", ...) that names the file and the byte of the problem.
    """
    size = path.stat().st_size
    if size == 0:
        raise _broken(path, 0, "is empty")
    if path.name.endswith(MEGATRON_NAMES):
        fix = "put the .idx file next to it"
        raise _broken(path, 0, "is Megatron's by its name, but its .idx file is missing", fix)
    head = np.fromfile(path, "<i4", count=min(HEADER_INTS, size // 4))
    of_llmc = head.size > 1 and head[0] in DATES and head[1] in VERSIONS
    if of_llmc or (head.size and head[0] in LLMC):
        return _read_llmc(path, size, head)
    if size % 2:
        raise _broken(path, size - 1, f"has {size:,} bytes, which is odd for 16-bit tokens")
    return TokenFile(path, "nanogpt", np.dtype("<u2"), 0, size // 2, None)


def _read_llmc(path: Path, size: int, head: np.ndarray) -> TokenFile:
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
    return TokenFile(path, "llmc", dtype, HEADER_BYTES, count, None)


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
