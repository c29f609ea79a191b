"""Marks for cases of a test that `make test` leaves out and `make test-all` runs."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def slow(*values: Any, id: str | None = None):
    """One case of `pytest.mark.parametrize`, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def slow_but(quick: Sequence[Any], cases: Iterable[Any]) -> list:
    """The cases of a parameter, each marked slow but those that are in `quick`."""
    cases = list(cases)
    unknown = [case for case in quick if case not in cases]
    assert not unknown, f"no such case: {unknown}"
    values = lambda case: case if isinstance(case, tuple) else (case,)  # noqa: E731
    return [case if case in quick else slow(*values(case)) for case in cases]
