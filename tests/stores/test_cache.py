"""The cache of parts: threads that meet, folders that may only be read, data of other programs."""

import contextlib
import os
import threading

import pytest

from jaxpar.config import ConfigError
from jaxpar.data import stored as stored_folder
from jaxpar.data.sources import open_sources
from jaxpar.stores import cache
from jaxpar.stores.cache import ObjectDamaged, PartCache
from tests.another_user import as_another_user, open_folder
from tests.stores.server import objects_at
from tests.stores.test_data import config, data, here, loader, small_parts, text

__all__ = ["data", "here", "small_parts", "text"]  # fixtures


@pytest.mark.waits
def test_threads_may_meet_a_truncated_part(tmp_path):
    parts = PartCache(tmp_path / "parts", 1 << 20)
    content, failed = b"x" * 100, list[BaseException]()
    read = lambda: parts.read("key", 0, 100, slice(90, 100), lambda: content)  # noqa: E731
    place = parts.place("key", 0)

    def many() -> None:
        try:
            for _ in range(300):
                assert read() == content[90:]
        except BaseException as error:
            failed.append(error)

    read()
    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with contextlib.suppress(FileNotFoundError):  # a thread has just found it cut
            os.truncate(place, 50)  # the same file: what was checked is cut
    for thread in threads:
        thread.join()
    assert not failed


def test_a_part_that_another_thread_has_forgotten_is_no_error(tmp_path, monkeypatch):
    parts = PartCache(tmp_path / "parts", 1 << 20)
    parts.read("key", 0, 100, slice(0, 1), lambda: b"x" * 100)
    read = cache.os.pread

    def cut(handle: int, size: int, first: int) -> bytes:
        parts._checked.clear()  # as the other one
        return read(handle, size, first)[:-1]

    monkeypatch.setattr(cache.os, "pread", cut)
    assert parts.read("key", 0, 100, slice(5, 9), lambda: b"") == b"xxxx"


def test_a_folder_that_may_only_be_read_is_read(capfd):
    with open_folder() as place:
        parts = PartCache(place / "parts", 1 << 20)
        parts.read("key", 0, 3, slice(0, 3), lambda: b"old")

        def call() -> list[bytes]:
            mine = PartCache(place / "parts", 1 << 20)
            one = lambda n: mine.read("key", n, 3, slice(0, 3), lambda: b"new")  # noqa: E731
            return [one(0), one(1), one(1)]

        place.chmod(0o555)
        (place / "parts").chmod(0o555)
        (place / "parts" / "locks").chmod(0o444)
        assert as_another_user(call) == "[b'old', b'new', b'new']"
        assert sorted(path.name for path in (place / "parts" / "key").iterdir()) == ["00000000"]
    assert capfd.readouterr().err.count("cannot be written") == 1


def test_a_cache_folder_of_another_user_is_one_error(address, here, s3):
    for path in here.iterdir():
        objects_at(address).upload(path.name, path)
    with open_folder() as place:
        cfg = config(address, **{"data.cache_dir": str(place / "none")})
        place.chmod(0o555)
        told = as_another_user(lambda: open_sources(cfg, "train"))
    assert told.startswith("ConfigError: data.cache_dir = ") and "Permission denied" in told


@pytest.fixture
def copied(data, here, s3):
    """A dataset that another program has copied: nothing lists its files or its parts."""
    for path in here.iterdir():
        objects_at(data).upload(path.name, path)
    return data


def test_what_another_program_has_copied_is_verified_once(copied, s3, capsys):
    loader(config(copied)).batch(0)
    told = capsys.readouterr()
    assert f"checking   {copied}/train.bin" in told.out and not told.err
    stored_folder.close_all()  # as a new process
    s3.requests.clear()
    loader(config(copied)).batch(0)
    assert "checking" not in capsys.readouterr().out
    assert not [path for method, path in s3.requests if method == "GET" and "train.bin" in path]


def test_zeros_are_found_at_the_start(copied, s3):
    store = objects_at(copied)
    size, _ = store.about("train.bin")
    store.write("train.bin", bytes(size))
    with pytest.raises(ConfigError, match=r"train.bin has other content than meta.json records"):
        loader(config(copied))


def test_zeros_that_come_after_the_check_are_found(copied, s3, monkeypatch):
    """The parts were deleted from the cache, and a proxy has the object's ETag, and not it."""
    sources = open_sources(config(copied), "train")
    tokens = sources[0].dataset.tokens
    for part in (stored_folder.cache_folder("data") / "parts").glob("*/*"):
        part.unlink()
    store = tokens.arrays[0].stored._objects
    get = stored_folder.Objects.read_range
    zeros = lambda self, name, first, last, stamp, ok: get(  # noqa: E731
        self, name, first, last, stamp, lambda content: ok(bytes(len(content)))
    )
    monkeypatch.setattr(type(store), "read_range", zeros)
    with pytest.raises(ObjectDamaged, match=r"are not what was written"):
        tokens[:]


def test_starts_of_documents_that_differ_are_found(copied):
    store = objects_at(copied)
    content, _ = store.read("train.documents.npy")
    store.write("train.documents.npy", content[:-16] + content[-8:] + content[-8:])
    with pytest.raises(ConfigError, match=r"train.documents.npy has sha256 .* but meta.json"):
        loader(config(copied))


def test_what_is_too_large_to_check_is_named_once(copied, monkeypatch, capsys):
    monkeypatch.setattr(stored_folder, "CHECKED_BYTES", 10)
    loader(config(copied)).batch(0)
    told = capsys.readouterr().out
    assert told.count(f"WARNING    {copied}/train.bin, ") == 1 == told.count("is not verified")


def test_what_a_process_knows_of_parts_that_were_deleted_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "PART_BYTES", 100)
    parts = PartCache(tmp_path / "parts", 8 * 116)
    for number in range(200):
        parts.read("key", number, 100, slice(0, 1), lambda: b"x" * 100)
        parts.read("key", number, 100, slice(0, 1), lambda: b"")
    assert len(parts._checked) <= 20 < 200
