"""Random damage to bytes, JSON, JSON Lines, safetensors and .gz files."""

import copy
import gzip
import json
import random
from collections.abc import Callable
from typing import Any

#: Values of the wrong type or size, for any place of a JSON text; tuples are raw text.
STRANGE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64, 10**25, 0.5, 1e308),
    *("", "a", "\x1b[2J", "x" * 10_000, "../../etc/passwd", "\0", [], {}, [[]], [1, 2], {"a": 1}),
    *(("NaN",), ("Infinity",), ("-Infinity",), ("1e999",), ("9" * 5_000,), ('"\\ud800"',)),
    *(("[" * 100_000,), ("[" * 2_000 + "]" * 2_000,), ('{"a":' * 500 + "1" + "}" * 500,)),
)

#: Whole texts.
WHOLE = (b"", b"null", b"[]", b"{}", b"{", b"NaN", b"[" * 100_000, b"\xff\xfe", b"1", b'"a"')


def of_bytes(data: bytes, noise: random.Random) -> bytes:
    """Flip bits, cut, repeat, insert or zero bytes."""
    changed, at = bytearray(data), noise.randrange(len(data) or 1)
    size = noise.choice((1, 4, 64, 4096))
    match noise.randrange(6):
        case 0:
            for _ in range(noise.randint(1, 8)):
                if changed:
                    changed[noise.randrange(len(changed))] ^= 1 << noise.randrange(8)
        case 1:
            del changed[at:]
        case 2:
            changed[at:at] = changed[at : at + size]
        case 3:
            changed[at:at] = noise.randbytes(size)
        case 4:
            changed[at : at + size] = bytes(size)
        case 5:
            changed[at : at + 8] = b"\xff" * 8
    return bytes(changed)


def of_json(data: bytes, noise: random.Random) -> bytes:
    """Put a strange value at a random place, remove or repeat a key, or damage the bytes."""
    how = noise.randrange(10)
    if how == 0:
        return noise.choice(WHOLE)
    if how == 1:
        return of_bytes(data, noise)
    value = json.loads(data)
    for _ in range(noise.choice((1, 1, 3))):
        _change(value, noise)
    raw = [strange[0] for strange in STRANGE if isinstance(strange, tuple)]
    text = json.dumps(value)
    for number, strange in enumerate(raw):
        text = text.replace(f'"raw {number}"', strange)
    return text.encode()


def _change(value: Any, noise: random.Random) -> None:
    """Change a random item of an object or array, at a random depth."""
    raw = [strange for strange in STRANGE if isinstance(strange, tuple)]
    while isinstance(value, dict | list) and value:
        key = noise.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if isinstance(value[key], dict | list) and value[key] and noise.random() < 0.8:
            value = value[key]
            continue
        strange = noise.choice(STRANGE)
        if noise.random() < 0.15:
            del value[key]
        elif isinstance(strange, tuple):
            value[key] = f"raw {raw.index(strange)}"
        else:
            value[key] = copy.deepcopy(strange)
        return


def of_lines(data: bytes, noise: random.Random) -> bytes:
    """Damage one line of JSON Lines, or the bytes."""
    lines = data.splitlines(keepends=True)
    at = noise.randrange(len(lines))
    if noise.random() < 0.2:
        return of_bytes(data, noise)
    lines[at] = of_json(lines[at], noise) + b"\n"
    return b"".join(lines)


def of_safetensors(data: bytes, noise: random.Random) -> bytes:
    """Damage the header, the values, or the length of the header."""
    length = int.from_bytes(data[:8], "little")
    if noise.random() < 0.3:
        return of_bytes(data, noise)
    header = of_json(data[8 : 8 + length], noise)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def packed(mutate: Callable) -> Callable:
    """Damage the content of a .gz file, or the file."""

    def change(data: bytes, noise: random.Random) -> bytes:
        if noise.random() < 0.3:
            return of_bytes(data, noise)
        return gzip.compress(mutate(gzip.decompress(data), noise), 1)

    return change
