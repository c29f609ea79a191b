"""The command's tests compare meshes alone: `test_checks.py` has the other checks."""

import functools

import pytest

from jaxpar.certification import command
from jaxpar.certification.checks import CHECKS


@pytest.fixture(autouse=True)
def meshes_alone(monkeypatch):
    """Runs the first check of the command."""
    monkeypatch.setattr(
        command, "run_checks", functools.partial(command.run_checks, checks=CHECKS[:1])
    )
