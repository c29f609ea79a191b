"""Reads arrays of a checkpoint piece by piece, with errors that say whether it is damaged."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.checkpoint import integrity, store


def reason(step_folder: Path, error: Exception) -> str:
    """Summarize an error in one line. Raises:   Unreadable for an error of the machine."""
    integrity.refuse_trouble(str(step_folder), error)
    return (str(error) or type(error).__name__).partition("\n")[0][:200]


@contextlib.contextmanager
def _reading(place: Path, what: str) -> Iterator[None]:
    """Convert errors of reading. Raises:   Damaged with a description; or Unreadable."""
    try:
        yield
    except Exception as error:
        raise integrity.Damaged(str(place), [f"{what} ({reason(place, error)})"]) from error


def array_names(place: Path) -> set[str]:
    """Return the names of all arrays. Raises:   Damaged; Unreadable."""
    with _reading(place, "its arrays cannot be listed"):
        return set(store.array_names(place))


def opened(place: Path, name: str) -> Any:
    """Open an array. Raises:   Damaged; Unreadable."""
    with _reading(place, f"{name} cannot be opened"):
        return store.open_array(place, name)


def piece(place: Path, name: str, array: Any, box: Any) -> np.ndarray:
    """Read a box of an open array. Raises:   Damaged; Unreadable."""
    with _reading(place, f"{name} cannot be read"):
        return np.ascontiguousarray(array[box].read().result())
