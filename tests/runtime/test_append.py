"""Lines for which a disk has no room wait for it."""

import errno
import json
import os
import shutil

import pytest

from jaxpar.runtime.files import append, json_lines
from jaxpar.runtime.files.append import Lines


class Disk:
    """A file on a disk that has room for so many bytes."""

    def __init__(self):
        self.room, self.held, self.error = 10**9, b"", errno.ENOSPC

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(self.error, "no room")
        taken = data[: self.room]
        self.held, self.room = self.held + taken, self.room - len(taken)
        return len(taken)

    def close(self):
        pass


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A disk, and the file on it."""
    made = Disk()
    file = Lines(tmp_path / "lines")
    monkeypatch.setattr(file, "_file", made)
    return made, file


def test_lines_wait_and_come_whole_and_in_order(disk, capfd):
    made, file = disk
    file.write("one\n")
    made.room = 2
    for text in ("two\n", "three\n"):
        file.write(text)
    assert made.held == b"one\ntw"
    told = capfd.readouterr().err
    assert told.count("WARNING") == 1 and "its lines wait" in told
    made.room = 10**9
    file.write("four\n")
    assert made.held == b"one\ntwo\nthree\nfour\n"
    made.room = 0
    file.write("five\n")
    assert "its lines wait" in capfd.readouterr().err  # told again
    file.close()
    assert "is missing its last 1 lines" in capfd.readouterr().err


def test_what_waits_is_bounded_and_other_errors_are_raised(disk, capfd, monkeypatch):
    made, file = disk
    monkeypatch.setattr(append, "MAX_WAITING_BYTES", 20)
    made.room = 0
    for number in range(10):
        file.write(f"line {number}\n")
    made.room = 10**9
    file.write("")
    assert made.held == b"line 8\nline 9\n"
    assert "its oldest waiting lines are lost" in capfd.readouterr().err
    made.room, made.error = 0, errno.EBADF
    with pytest.raises(OSError, match="no room"):
        file.write("more\n")


@pytest.mark.parametrize("before", ["", '{"step": 1}\n', '{"step": 1}\n{"step"', '{"step": 1}'])
def test_a_line_that_was_cut_off_takes_no_other_with_it(tmp_path, before):
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    file = Lines(path)
    assert path.read_text() == before  # a reader may be at it
    file.write('{"step": 2}\n')
    file.close()
    whole = [{"step": 1}] if before else []
    assert list(json_lines.read(path)) == [*whole, {"step": 2}]
    assert not path.read_text().startswith("\n") and "\n\n" not in path.read_text()


def test_a_line_that_a_full_disk_cut_off_takes_no_other_with_it(disk, monkeypatch):
    made, file = disk
    monkeypatch.setattr(append, "MAX_WAITING_BYTES", 20)
    made.room = 5
    for number in range(10):
        file.write(f"line {number}\n")
    made.room = 10**9
    file.write("")
    assert made.held == b"line \nline 8\nline 9\n"


def test_nothing_is_read_of_what_is_no_file():
    file = Lines(os.devnull)
    file.write("line\n")
    file.close()


@pytest.mark.parametrize("wrong", [b"[" * 100_000, b'{"a": Infinity}', b'"\xff"', b"5", b"{"])
def test_lines_that_cannot_be_read_are_skipped_and_named_once(tmp_path, capfd, wrong):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"step": 1}\n' + wrong + b"\n" + wrong + b'\n\n{"step": 2}\n{"step"')
    for _ in range(2):
        assert list(json_lines.read(path)) == [{"step": 1}, {"step": 2}]
    told = capfd.readouterr().err
    assert told.startswith(f"WARNING    line 2 of {path} is skipped, as are others like it: it ")
    assert told.count("\n") == 1


def test_a_line_that_is_too_long_is_not_kept_in_memory(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 20)
    path = tmp_path / "events.jsonl"
    long = json.dumps({"text": "x" * 1000})
    path.write_text(f'{{"step": 1}}\n{long}\n{{"step": 2}}\n{long}')
    assert list(json_lines.read(path)) == [{"step": 1}, {"step": 2}]
    assert "line 2 of" in capfd.readouterr().err


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_deleted_file_is_written_again_with_all_its_lines(tmp_path, monkeypatch, capfd, what):
    path = tmp_path / "run" / "metrics.jsonl"
    file = Lines(path)
    file.write("one\n")
    if what == "file":
        path.unlink()
    else:
        shutil.rmtree(path.parent)
    file.write("two\n")  # it looks once a second
    assert not path.exists()
    monkeypatch.setattr(append, "LOOK_SECONDS", 0)
    file.write("three\n")
    file.write("four\n")
    file.close()
    assert path.read_text() == "one\ntwo\nthree\nfour\n"
    told = capfd.readouterr().err
    assert told == f"WARNING    {path} was deleted during the run; its lines were written again\n"


def test_a_replaced_file_is_appended_to(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(append, "LOOK_SECONDS", 0)
    path = tmp_path / "metrics.jsonl"
    file = Lines(path)
    file.write("one\n")
    path.rename(tmp_path / "older")
    path.write_text("other")
    file.write("two\n")
    file.close()
    assert (tmp_path / "older").read_text() == "one\n"
    assert path.read_text() == "other\ntwo\n"
    assert "was replaced during the run" in capfd.readouterr().err


def test_a_deleted_folder_that_cannot_be_made_again_is_a_warning(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(append, "LOOK_SECONDS", 0)
    path = tmp_path / "run" / "metrics.jsonl"
    file = Lines(path)
    shutil.rmtree(path.parent)
    path.parent.write_text("now a file")
    file.write("one\n")
    assert "and not all can be written again" in capfd.readouterr().err
    path.parent.unlink()
    file.write("two\n")
    file.close()
    assert path.read_text() == "one\ntwo\n"


def test_an_abandoned_folder_gets_no_more_lines(tmp_path):
    files = [Lines(tmp_path / name / "metrics.jsonl") for name in ("run", "other")]
    append.abandon(tmp_path / "run")
    for file in files:
        file.write("one\n")
        file.close()
    assert [file.path.read_text() for file in files] == ["", "one\n"]
