"""Write results to a JSON file that an option names."""

import json
from pathlib import Path
from typing import Any

from jaxpar.runtime import exit_codes
from jaxpar.runtime.files import atomic


def write(option: str, path: str | Path, value: Any) -> None:
    """Write a value atomically, and create its parent folders.

    Args:     option: the option that names the file, for the error.
    Raises:   RunError if the file cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, (json.dumps(value, indent=2) + "\n").encode())
    except OSError as error:
        kept = ". The existing file is unchanged" if path.is_file() else ""
        why = f"cannot be written: {error.strerror or error}{kept}"
        raise exit_codes.RunError(f"{option} = {str(path)!r}: {why}") from error
