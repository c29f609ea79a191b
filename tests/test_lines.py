"""Lines for which a disk has no room wait for it."""

import errno

import pytest

from jaxpar import lines
from jaxpar.lines import Lines


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
    assert "lacks its last 1 lines" in capfd.readouterr().err


def test_what_waits_is_bounded_and_other_errors_are_raised(disk, capfd, monkeypatch):
    made, file = disk
    monkeypatch.setattr(lines, "MOST_WAITING", 20)
    made.room = 0
    for number in range(10):
        file.write(f"line {number}\n")
    made.room = 10**9
    file.write("")
    assert made.held == b"line 8\nline 9\n"
    assert "its oldest lines are lost" in capfd.readouterr().err
    made.room, made.error = 0, errno.EBADF
    with pytest.raises(OSError, match="no room"):
        file.write("more\n")
