"""A JSON file that an option names: figures, written whole or not at all."""

import json
from pathlib import Path
from typing import Any

from jaxpar.runtime import exit_codes
from jaxpar.runtime.files import atomic


def write(option: str, path: str | Path, value: Any) -> None:
    """Write a value whole, with the folders above it; an earlier one stays till then.

    Args:     option: the one that names the file, for the error.
    Raises:   guard.RunError when it cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, (json.dumps(value, indent=2) + "\n").encode())
    except OSError as error:
        kept = ". The file that is there is as it was" if path.is_file() else ""
        why = f"cannot be written: {error.strerror or error}{kept}"
        raise exit_codes.RunError(f"{option} = {str(path)!r}: {why}") from error
