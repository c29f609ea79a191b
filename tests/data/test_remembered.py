"""Files of tokens are read whole once, and again when anything about them changes."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from jaxpar.config import ConfigError
from jaxpar.data.formats import token_file
from jaxpar.data.formats.inspect import inspect_tokens
from jaxpar.data.options import InspectOptions
from jaxpar.data.sources import open_tokens

TOKENS = np.arange(1, 50_001, dtype="<u2")


@pytest.fixture
def passes(tmp_path, monkeypatch):
    """The files that were read whole, since the last look, by one process after another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read, seen = token_file._read, []

    def counted(file, eos_id):
        seen.append(file.path.name)
        return read(file, eos_id)

    def look() -> list[str]:
        token_file._of_this_process.clear()
        found = seen.copy()
        seen.clear()
        return found

    monkeypatch.setattr(token_file, "_read", counted)
    return look


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "x.bin"
    TOKENS.tofile(path)
    return path


def test_a_file_is_read_once(file, passes):
    first = open_tokens(file, eos_id=7)
    assert passes() == ["x.bin"]
    second = open_tokens(file, eos_id=7)
    assert passes() == []
    assert (second.fingerprint, second.vocab_size) == (first.fingerprint, first.vocab_size)
    np.testing.assert_array_equal(second.document_offsets, first.document_offsets)
    assert second.document_offsets[:].tolist() == [0, 7, 50_000]
    assert open_tokens(file, eos_id=8).document_offsets[:].tolist() == [0, 8, 50_000]
    assert passes() == ["x.bin"]  # another end of text is another question


def write_in_place(file: Path) -> None:
    """Other tokens, the same size, and a time of change that is put back."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(33_333)
        opened.write(b"\x01")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(file: Path) -> None:
    other = file.with_name("other")
    (TOKENS + 1).tofile(other)
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.replace(file)


def grow(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"\x01\x00")


@pytest.mark.waits
@pytest.mark.parametrize("change", [write_in_place, replace, grow])
def test_a_file_that_changed_is_read_again(change, file, passes):
    before = open_tokens(file)
    passes()
    time.sleep(0.02)  # beyond the grain of the file system's clock
    change(file)
    after = open_tokens(file)
    assert passes() == ["x.bin"] and after.fingerprint != before.fingerprint


def test_pieces_tell_files_apart_where_times_do_not(file, monkeypatch):
    stat = os.stat(file)
    before = token_file.identity(file)
    monkeypatch.setattr(Path, "stat", lambda *_, **__: stat)
    assert token_file.identity(file) == before
    np.concatenate([TOKENS[:-1], TOKENS[:1]]).tofile(file)
    assert token_file.identity(file) != before


def test_a_bad_file_is_an_error_each_time(tmp_path, passes):
    np.arange(1000, dtype="<u4").tofile(tmp_path / "x.bin")
    for _ in range(2):
        with pytest.raises(ConfigError, match="it has 32-bit tokens"):
            open_tokens(tmp_path / "x.bin")
        assert passes() == ["x.bin"]


def test_inspect_reads_everything(file, passes):
    open_tokens(file)
    passes()
    assert "50,000 tokens" in inspect_tokens(InspectOptions(path=str(file)))
    assert passes() == ["x.bin"]


@pytest.mark.parametrize("damage", [b"", b"no archive", None])
def test_what_cannot_be_recalled_is_found_again(damage, file, passes):
    wanted = open_tokens(file).fingerprint
    passes()
    (kept,) = token_file.folder().iterdir()
    kept.write_bytes(kept.read_bytes()[:100] if damage is None else damage)
    assert open_tokens(file).fingerprint == wanted and passes() == ["x.bin"]


def test_without_a_home(file, passes, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(token_file, "folder", home)
    assert open_tokens(file).num_tokens == 50_000 and passes() == ["x.bin"]


def test_without_a_folder_to_write_to(file, passes, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("in the way")
    for _ in range(2):
        assert open_tokens(file).num_tokens == 50_000
        assert passes() == ["x.bin"]


@pytest.mark.parametrize("module, name", [(np, "savez_compressed"), (os, "replace")])
def test_what_cannot_be_written_leaves_nothing(module, name, file, passes, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, name, full)
    assert open_tokens(file).num_tokens == 50_000
    assert list(token_file.folder().iterdir()) == []
