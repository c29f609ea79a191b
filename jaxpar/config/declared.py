"""Reads JSON that another process has written, as a value of a declared type.

Such a file or message may come from another version of jaxpar, from a failing disk or from a
stranger. Each format is a class, whose annotations declare the fields and their bounds
(`msgspec.Meta`). Fields that the class does not have are ignored, so that a later version may add
some. A format whose fields change their meaning gets a new `VERSION`, which is written as the field
"version"; files without one are of version 1.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from jaxpar.config.json_reader import MAX_BYTES, UnreadableJson, read_json_object
from jaxpar.config.printable import printable

#: Default limit on the levels of arrays and objects within each other.
MAX_DEPTH = 16

#: Most characters of an error that describes a text from elsewhere.
_MAX_WORDS = 200

#: A number of steps, bytes, tokens or elements.
type Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]

#: A name, a path or an address.
type Name = Annotated[str, msgspec.Meta(max_length=4096)]

#: A port of TCP; 0: none.
type Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Misshapen(UnreadableJson):
    """JSON does not have the declared form. The message is one line and names field and rule."""


def read[T](
    kind: type[T],
    source: Path | bytes,
    *,
    what: str = "",
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
) -> T:
    """Return the value of a JSON text.

    Args:     kind: a dataclass or a `msgspec.Struct`. source: a path, or the text itself. what: the
              name of the text in errors; by default, the path. max_bytes: the most bytes that are
              read.
    Raises:   Misshapen for another form or version; UnreadableJson as `read_json`; OSError.
    """
    what = what or ("it" if isinstance(source, bytes) else str(source))
    value = read_json_object(source, what=what, max_bytes=max_bytes, max_depth=max_depth)
    return convert(kind, value, what)


def convert[T](kind: type[T], value: Any, what: str = "it") -> T:
    """Return a value of JSON as a value of a declared type. Args and Raises as `read`."""
    wanted = version_of(kind)
    found = value.get("version", 1) if isinstance(value, dict) else wanted
    if type(found) is not int or found != wanted:
        shown = found if type(found) is int else "another kind"
        raise Misshapen(f"{what} has format version {shown}, and this jaxpar reads {wanted}")
    try:
        return msgspec.convert(value, kind)
    except (ValueError, OverflowError, RecursionError) as error:  # ValidationError is a ValueError
        words = printable(str(error))[:_MAX_WORDS].replace("`", "").replace("$.", "")
        raise Misshapen(f"{what} has another form: {words}") from None


def version_of(kind: type) -> int:
    """Return the version of a format."""
    return int(getattr(kind, "VERSION", 1))


def to_builtins(value: Any) -> dict[str, Any]:
    """Return a value of a declared type as JSON's types, with the version of its format."""
    fields = msgspec.to_builtins(value)
    assert isinstance(fields, dict)
    return {"version": version_of(type(value)), **fields}


def to_json(value: Any, indent: int | None = None) -> str:
    """Return the text of a value of a declared type, with the version of its format."""
    return json.dumps(to_builtins(value), indent=indent)
