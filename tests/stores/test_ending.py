"""The end of a run: all of it is in the store, or it says so and has a code of its own."""

import pytest

from jaxpar.runtime import exit_codes
from jaxpar.runtime.program import _verdict
from jaxpar.stores import mirror, objects, steps
from jaxpar.stores.mirror import NotStored
from jaxpar.stores.objects import Altered, StoreError
from tests.stores.folders import read_step, write_run, write_step
from tests.stores.server import objects_at
from tests.stores.test_mirror import mirrored

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

STEPS = ("--train.num-steps=4", "--checkpoint.every=2", "--evaluation.every=0")


@pytest.mark.slow
def test_a_run_that_is_not_stored_ends_with_its_own_code_and_is_later(
    s3, address, store, train_on, config_file, capfd, monkeypatch
):
    monkeypatch.setattr(mirror, "DRAIN_FAILING_SECONDS", 0.3)
    refuse = lambda method, path: 503 if method == "PUT" and "/checkpoints/" in path else None  # noqa: E731
    s3.fault = refuse
    with pytest.raises(NotStored, match=r"not all of the run is in s3://.*Fix: ") as caught:
        train_on(1, config_file, f"--run.dir={address}", *STEPS)
    assert _verdict(caught.value)[0] == exit_codes.EXIT_NOT_STORED == 73
    said = capfd.readouterr().err
    assert f"not in {address} (" in said and "checkpoints of steps " in said
    assert "the same command on this host uploads it" in said
    assert not steps.complete_steps(store)
    s3.fault = lambda method, path: None
    assert train_on(1, str(address)) == exit_codes.EXIT_OK
    assert steps.complete_steps(store) == [2, 4]


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        (lambda store, name: store.delete([name]), "was sent, and is not there"),
        (lambda store, name: store.write(name, b"cut"), "has 3 bytes, not the 20,000 that were"),
    ],
)
def test_a_server_that_stores_something_else_is_noticed(
    address, store, tmp_path, monkeypatch, capsys, lie, what
):
    """It answers every request as if it had stored the file."""
    upload = objects.Objects.upload

    def lying(self, name, file, beside=1):
        there = upload(self, name, file, beside)
        if name.endswith("state/d/0123"):
            lie(self, name)
        return there

    write_run(tmp_path / "run", [10])
    monkeypatch.setattr(objects.Objects, "upload", lying)
    monkeypatch.setattr(mirror, "DRAIN_FAILING_SECONDS", 0.2)
    with mirrored(address, tmp_path / "run") as thread:
        pass
    assert not thread.drain() and not steps.complete_steps(store)
    assert what in capsys.readouterr().err


def test_who_has_lost_the_lease_completes_nothing_that_another_has(address, store, tmp_path):
    """Its last request arrives late, after the check."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_step(ours, 10, seed=1)
    write_step(theirs, 10, seed=2)
    checks = [0]

    def taken_at_the_end() -> None:
        checks[0] += 1
        if checks[0] == 2:  # the last one before complete/10
            steps.upload_step(objects_at(address), theirs, 10, lambda: None)

    with pytest.raises(StoreError, match="complete/10 was written by another run"):
        steps.upload_step(store, ours, 10, taken_at_the_end)
    steps.download_step(store, tmp_path / "copy", 10)
    assert read_step(tmp_path / "copy", 10) == read_step(theirs, 10)


def test_nothing_is_deleted_before_the_lease_is_looked_at(address, store, tmp_path):
    write_step(tmp_path, 10)
    steps.upload_step(store, tmp_path, 10, lambda: None)

    def lost() -> None:
        raise StoreError("the lease is lost")

    with pytest.raises(StoreError, match="the lease is lost"):
        steps.upload_step(store, tmp_path, 10, lost)
    assert steps.complete_steps(store) == [10]


def test_a_lost_answer_to_the_last_request_completes_the_step(s3, address, store, tmp_path):
    write_step(tmp_path, 10)
    s3.failing(1, "lost", "PUT", "complete/10")
    assert steps.upload_step(store, tmp_path, 10, lambda: None) > 20_000
    assert steps.complete_steps(store) == [10]


@pytest.mark.parametrize("step", [403, 401])
def test_a_refusal_is_not_damage(s3, store, tmp_path, step):
    """ConfigError is a ValueError, as are those of a damaged list."""
    write_step(tmp_path, 10)
    steps.upload_step(store, tmp_path, 10, lambda: None)
    s3.failing(99, step, "GET", "complete/10")
    with pytest.raises(objects.ConfigError, match="is not allowed"):
        steps.download_step(store, tmp_path / "copy", 10)


def test_one_bound_of_time_is_for_all_that_is_tried_again(s3, address, monkeypatch):
    monkeypatch.setattr(objects, "SHORT_SECONDS", 0.2)
    monkeypatch.setattr(objects, "BACKOFF_SECONDS", 0.15)
    store = objects.Objects(address, "RUN", patient=False)
    s3.failing(10_000, 503)
    s3.requests.clear()
    s3.fault = lambda method, path: 503
    with pytest.raises(StoreError, match=r"failed [12] times in \d+ s: "):
        store.names()
    assert len(s3.requests) <= 2


def test_what_arrives_altered_is_read_again(s3, store, tmp_path, monkeypatch):
    (tmp_path / "in").write_bytes(b"content")
    there = store.upload("x", tmp_path / "in")
    get, left = objects.obstore().get, [2]

    def altered(client, name, **more):
        found = get(client, name, **more)
        if not left[0]:
            return found
        left[0] -= 1
        return type("Answer", (), {"stream": lambda self, **_: [b"\0" * 7]})()

    monkeypatch.setattr(objects.obstore(), "get", altered)
    store.download("x", tmp_path / "out", there)
    assert (tmp_path / "out").read_bytes() == b"content" and not left[0]
    left[0] = 99
    with pytest.raises(Altered, match="x has different content"):
        store.download("x", tmp_path / "again", there)
    assert not (tmp_path / "again").exists() and left[0] == 99 - objects.ATTEMPTS
