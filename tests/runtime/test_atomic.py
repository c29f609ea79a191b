"""A file or folder is replaced completely or not at all, also by a power failure."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from jaxpar.runtime.files import atomic


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The flushes and renames that the system is asked for, in their order."""
    made: list[tuple[str, str]] = []
    flush, replace = os.fsync, os.replace

    def flushed(handle: int) -> None:
        made.append(("flush", os.readlink(f"/proc/self/fd/{handle}")))
        flush(handle)

    def replaced(source: Path, target: Path) -> None:
        made.append(("rename", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", replaced)
    return made


def test_the_content_is_flushed_before_the_name_and_the_name_after(tmp_path, calls):
    atomic.write(tmp_path / "x", b"1")
    assert calls[0][0] == "flush" and calls[0][1] != str(tmp_path)
    assert calls[1:] == [("rename", str(tmp_path / "x")), ("flush", str(tmp_path))]
    calls.clear()
    with atomic.new_folder(tmp_path / "made") as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "a").write_bytes(b"1")
        (folder / "b").write_bytes(b"2")
    where = [kind for kind, _ in calls].index("rename")
    assert {Path(path).name for _, path in calls[:where]} >= {"a", "b", "deep"}
    assert calls[where:] == [("rename", str(tmp_path / "made")), ("flush", str(tmp_path))]


def test_what_a_cache_can_lose_is_not_flushed(tmp_path, calls):
    with atomic.new_file(tmp_path / "x", durable=False) as file:
        file.write_bytes(b"1")
    assert [kind for kind, _ in calls] == ["rename"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_flush_leaves_the_old_content(tmp_path, monkeypatch, number):
    (tmp_path / "x").write_bytes(b"old")

    def failed(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failed)
    with pytest.raises(OSError, match="x") as caught:
        atomic.write(tmp_path / "x", b"new")
    assert caught.value.errno == number
    assert (tmp_path / "x").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_a_file_system_that_cannot_flush_is_no_error(tmp_path, monkeypatch):
    def refused(handle: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refused)
    atomic.write(tmp_path / "x", b"1")
    assert (tmp_path / "x").read_bytes() == b"1"


def test_a_failure_leaves_nothing(tmp_path):
    for make in (atomic.new_file, atomic.new_folder):
        with pytest.raises(KeyboardInterrupt), make(tmp_path / "x"):
            raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o002])
def test_permissions_are_those_of_any_other_file(tmp_path, mask):
    before = os.umask(mask)
    try:
        atomic.write(tmp_path / "x", b"")
        with atomic.new_folder(tmp_path / "made") as made:
            (made / "a").write_bytes(b"")
        (tmp_path / "plain").write_bytes(b"")
        (tmp_path / "folder").mkdir()
    finally:
        os.umask(before)
    mode = lambda name: stat.S_IMODE((tmp_path / name).stat().st_mode)  # noqa: E731
    assert mode("x") == mode("made/a") == mode("plain") == 0o666 & ~mask
    assert mode("made") == mode("folder") == 0o777 & ~mask


@pytest.mark.waits
def test_the_umask_of_other_threads_is_never_changed(tmp_path, monkeypatch):
    def changed(mask: int) -> int:
        raise AssertionError("a file that another thread makes now is open to all users")

    monkeypatch.setattr(os, "umask", changed)
    threads = [
        threading.Thread(target=lambda n=n: atomic.write(tmp_path / "x", b"%d" % n * 4000))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = (tmp_path / "x").read_bytes()
    assert len(content) == 4000 and len(set(content)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_links_and_devices_stay(tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    atomic.write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"new"
    atomic.write("/dev/null", b"x")
    assert not Path("/dev/null").is_file()


def test_the_longest_name_can_be_written(tmp_path):
    atomic.write(tmp_path / ("x" * 255), b"1")
    assert (tmp_path / ("x" * 255)).read_bytes() == b"1"
