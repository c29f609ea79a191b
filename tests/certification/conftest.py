"""Tests of the command compare meshes alone, as `test_checks.py` has the other checks, in an empty
folder: certificates of configs go to their runs' folders, which are relative."""

import functools

import pytest

from jaxpar.certification import command
from jaxpar.certification.checks import CHECKS
from jaxpar.certification.comparison import MESHES


@pytest.fixture(autouse=True)
def meshes_alone(monkeypatch):
    """Runs one check of the command."""
    checks = [(name, check) for name, check in CHECKS if name == MESHES]
    monkeypatch.setattr(command, "run_checks", functools.partial(command.run_checks, checks=checks))


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
