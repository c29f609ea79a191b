"""Objects of a store: content, conditional writes, retries, and errors that say what to do."""

import threading
import time

import pytest

from jaxpar.config import ConfigError
from jaxpar.stores import objects, steps
from jaxpar.stores.objects import ATTEMPTS, Altered, Conflict, Content, Missing, StoreError
from tests.ranks import HANG
from tests.stores.server import objects_at


def test_files_return_as_they_were(store, tmp_path):
    for name, content in {"a/b": bytes(range(256)) * 99, "empty": b""}.items():
        (tmp_path / "in").write_bytes(content)
        there = store.upload(name, tmp_path / "in")
        assert there.bytes == len(content)
        store.download(name, tmp_path / "out" / name, there)
        assert (tmp_path / "out" / name).read_bytes() == content
    assert [one.name for one in store.names()] == ["a/b", "empty"]
    assert [one.name for one in store.names("a/")] == ["a/b"]
    store.delete(["a/b", "none"])
    with pytest.raises(Missing):
        store.read("a/b")


def test_a_large_file_is_sent_in_parts(store, tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)  # S3's smallest
    content = bytes(range(251)) * 50_000
    (tmp_path / "in").write_bytes(content)
    there = store.upload("large", tmp_path / "in")
    store.download("large", tmp_path / "out", there)
    assert (tmp_path / "out").read_bytes() == content


@pytest.mark.parametrize("size", [0, 10**9, 10**12, 5 << 40, 43 << 40])
def test_parts_are_within_the_limits_of_s3(size):
    """10,000 parts, of 5 MiB to 5 GiB; and what waits in memory is bounded."""
    part, at_once = objects.parts_of_upload(size)
    assert 5 << 20 <= part <= objects.MAX_PART_BYTES == 5 << 30
    assert size <= 10_000 * part and part * at_once <= max(256 << 20, part)


def test_a_file_above_the_limits_is_refused(store, tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "MAX_PART_BYTES", 16 << 20)
    with open(tmp_path / "in", "wb") as file:
        file.truncate(1 << 42)  # read by nobody
    with pytest.raises(ConfigError, match=r"cannot have x: its 4,398,046,511,104 bytes are more"):
        store.upload("x", tmp_path / "in")


def test_conditional_writes(store):
    first = store.write_if("x", b"1", None)
    with pytest.raises(Conflict):
        store.write_if("x", b"2", None)
    store.write_if("x", b"2", first)
    with pytest.raises(Conflict):
        store.write_if("x", b"3", first)
    assert store.read("x")[0] == b"2"


@pytest.mark.parametrize("status", [500, 503])
def test_passing_errors_of_the_server_are_retried(s3, store, status, tmp_path):
    (tmp_path / "in").write_bytes(b"content")
    s3.failing(ATTEMPTS - 1, status)
    there = store.upload("x", tmp_path / "in")
    s3.failing(ATTEMPTS - 1, status, "GET")
    store.download("x", tmp_path / "out", there)
    assert (tmp_path / "out").read_bytes() == b"content"


def test_errors_that_stay_are_reported_with_the_number_of_attempts(s3, store):
    s3.failing(99, 503)
    with pytest.raises(StoreError, match=f"writing x failed {ATTEMPTS} times in .* s: .*503"):
        store.write("x", b"")
    assert len(s3.requests) == ATTEMPTS + 1  # and the bucket's


def test_a_request_without_an_answer_is_sent_again(s3, address, monkeypatch):
    monkeypatch.setattr(objects, "REQUEST_SECONDS", 0.3)
    store = objects_at(address)
    s3.failing(1, 1.0, "GET")
    with pytest.raises(Missing):
        store.read("x")
    s3.failing(1, 1.0, "PUT")
    store.write("x", b"1")
    assert store.read("x")[0] == b"1"


def test_what_no_retry_mends_is_refused_at_once(s3, store, address):
    s3.failing(99, 403, part=address.bucket)
    with pytest.raises(ConfigError, match=r"run.store = 's3://.*is not allowed.*Fix: give"):
        store.write("x", b"")
    none = objects_at(address._replace(bucket="no-such-bucket"))
    for call in (lambda: none.write("x", b""), lambda: none.read("x"), none.names):
        with pytest.raises(ConfigError, match=r"has a bucket that does not exist.*no-such"):
            call()
    assert len(s3.requests) == 5  # one each


def test_altered_objects_are_found(store, tmp_path):
    there = Content(3, "0" * 64)
    for content, rule in {b"abcd": "has 4 bytes, not 3", b"abc": "has different content"}.items():
        store.write("x", content)
        with pytest.raises(Altered, match=f"x {rule}"):
            store.download("x", tmp_path / "x", there)
        assert not list(tmp_path.glob("*x*"))


@pytest.mark.waits
def test_the_parts_of_all_files_together_are_bounded(s3, store, tmp_path, monkeypatch):
    """Eight files at once: each request has its share of a slow link."""
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(objects, "PARTS_AT_ONCE", 4)
    asked, most, changed = [0], [0], threading.Condition()

    def slow(method: str, path: str) -> float | None:
        if method != "PUT":
            return None
        with changed:
            asked[0] += 1
            most[0] = max(most[0], asked[0])
            changed.notify_all()
            changed.wait_for(lambda: most[0] > 1, HANG)  # the first one, for a second
        time.sleep(0.05)  # a third to fifth may come meanwhile
        with changed:
            asked[0] -= 1
        return None

    s3.fault = slow
    for number in range(3):
        place = tmp_path / "checkpoints" / "1" / f"{number}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes(16 << 20))
    steps.upload_step(store, tmp_path, 1, lambda: None)
    assert 1 < most[0] <= 4
