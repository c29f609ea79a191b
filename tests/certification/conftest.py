"""Certificates of configs go to their runs' folders, which are relative: to an empty folder."""

import pytest


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
