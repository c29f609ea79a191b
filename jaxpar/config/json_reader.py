"""Read JSON that may be damaged or hostile, within limits of size, depth and numbers.

Python's `json` raises a RecursionError for `[` repeated, returns floats that are no numbers, and
builds integers of any length. A file from a stranger, or from a failing disk, may contain any of
them. All JSON files are therefore read here.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

#: Default limit on the bytes of a file. A parsed file takes up to 24 times its size in memory.
MAX_BYTES = 32 << 20

#: Default limit on the levels of arrays and objects within each other.
MAX_DEPTH = 64

#: Digits of the longest integer of 64 bits, with its sign.
_MAX_DIGITS = 20

#: An escaped half of a surrogate pair.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class UnreadableJson(ValueError):
    """A file is not JSON, or exceeds a limit. The message is one line and names the file."""


def read_json(
    source: Path | str | bytes,
    *,
    what: str = "",
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
    max_digits: int = 0,
    constants: bool = False,
) -> Any:
    """Return the value of a JSON text in UTF-8. If an object repeats a key, the last value counts.

    Args:     source: a path, or the text itself as bytes. what: the name of the text in errors;
              by default, the path.
              max_digits: largest number of digits of an integer that does not fit in 64 bits.
              constants: whether NaN and Infinity, which Python writes, are read as floats.
    Raises:   UnreadableJson for invalid UTF-8 or JSON, more than max_bytes, more than max_depth
              levels, NaN, Infinity, an integer outside [-2**63, 2**64), a float outside float64,
              or half a surrogate pair; OSError if the file cannot be opened or read.
    """
    what = what or ("JSON" if isinstance(source, bytes) else str(source))
    data = source if isinstance(source, bytes) else _content(Path(source), max_bytes)
    if len(data) > max_bytes:
        raise UnreadableJson(f"{what} is larger than {max_bytes:,} bytes")
    try:
        special = max_digits or constants
        decoder = _decoder(max_digits, constants) if special else _DECODER
        value = decoder.decode(data.decode("utf-8-sig"))
        _check_depth(data, value, max_depth)
        _check_text(data, value)
    except UnreadableJson as error:
        raise UnreadableJson(f"{what} {error}") from None
    except RecursionError:
        raise UnreadableJson(f"{what} {_too_deep(max_depth)}") from None
    except MemoryError:
        raise UnreadableJson(f"{what} does not fit in memory") from None
    except UnicodeDecodeError as error:
        text = f"is not valid UTF-8: byte 0x{data[error.start]:02x} at {error.start:,}"
        raise UnreadableJson(f"{what} {text}") from None
    except ValueError as error:
        raise UnreadableJson(f"{what} is not valid JSON: {error}") from None
    return value


def read_json_object(source: Path | str | bytes, **limits: Any) -> dict[str, Any]:
    """Return the object of a JSON text. Args and Raises as `read_json`, also for other values."""
    value = read_json(source, **limits)
    if not isinstance(value, dict):
        what = limits.get("what") or ("JSON" if isinstance(source, bytes) else str(source))
        raise UnreadableJson(f"{what} must be a JSON object, but is {_kind(value)}")
    return value


def _content(path: Path, max_bytes: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(max_bytes + 1)


def _integer(digits: str) -> int:
    # Checked before the conversion, which takes quadratic time.
    value = int(digits) if len(digits) <= _MAX_DIGITS else 1 << 64
    if not -(1 << 63) <= value < 1 << 64:
        shown = digits if len(digits) <= 2 * _MAX_DIGITS else f"{digits[:_MAX_DIGITS]}..."
        raise UnreadableJson(f"has an integer of more than 64 bits: {shown}")
    return value


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise UnreadableJson(f"has a number outside float64: {digits[: 2 * _MAX_DIGITS]}")
    return value


def _constant(name: str) -> NoReturn:
    raise UnreadableJson(f"has {name}, which is not a JSON number")


def _decoder(max_digits: int, constants: bool) -> json.JSONDecoder:
    """Make a decoder. Args:     max_digits, constants: as in `read_json`."""
    whole = lambda text: int(text) if len(text) <= max_digits else _integer(text)  # noqa: E731
    constant = float if constants else _constant
    return json.JSONDecoder(parse_int=whole, parse_float=_float, parse_constant=constant)


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=_constant)


def _check_depth(data: bytes, value: Any, max_depth: int) -> None:
    if data.count(b"[") + data.count(b"{") <= max_depth:
        return
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        if depth > max_depth:
            raise UnreadableJson(_too_deep(max_depth))
        level = [v for item in level for v in (item.values() if isinstance(item, dict) else item)]


def _too_deep(max_depth: int) -> str:
    return f"is nested deeper than {max_depth} levels"


def _check_text(data: bytes, value: Any) -> None:
    """Refuse half a surrogate pair: such text can be neither printed nor written."""
    if not _SURROGATE.search(data):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UnreadableJson("has text with half a surrogate pair") from None


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
