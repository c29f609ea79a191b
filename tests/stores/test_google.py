"""Runs and data at gs://: the requests that obstore makes, and their conditions."""

import pytest

from jaxpar.config import Config, ConfigError, replace
from jaxpar.stores import lease, mirror, steps
from jaxpar.stores.fetching import fetch
from jaxpar.stores.lease import Lease
from jaxpar.stores.objects import Conflict, Missing
from tests.stores.folders import append, read_step, write_run
from tests.stores.gcs import GoogleStorage, key_of
from tests.stores.server import objects_at
from tests.stores.test_lease import RunLocked
from tests.stores.test_mirror import mirrored, text_of


@pytest.fixture(scope="module")
def storage():
    found = GoogleStorage()
    yield found
    found.close()


@pytest.fixture
def address(storage, tmp_path, monkeypatch):
    (tmp_path / "key.json").write_text(key_of(storage))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "key.json"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", storage.url)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(mirror, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(mirror, "PART_SECONDS", 0.0)
    storage.requests.clear()
    return storage.address()


def test_conditions_are_generations(storage, address):
    store = objects_at(address)
    first = store.write_if("x", b"1", None)
    with pytest.raises(Conflict):
        store.write_if("x", b"2", None)
    store.write_if("x", b"2", first)
    with pytest.raises(Conflict):
        store.write_if("x", b"3", first)
    content, stamp = store.read("x")
    assert content == b"2" and stamp.version != first.version
    puts = [condition for method, _, condition in storage.requests if method == "PUT"]
    assert puts == ["0", "0", first.version, first.version]
    assert store.read_range("x", 0, 1, stamp) == b"2"
    with pytest.raises(Conflict):
        store.read_range("x", 0, 1, first)
    store.delete(["x", "none"])
    with pytest.raises(Missing):
        store.read("x")


def test_credentials_that_cannot_be_read_are_refused(address, tmp_path, monkeypatch):
    (tmp_path / "key.json").write_text("{}")
    for name in ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT", raising=False)
        monkeypatch.setenv(name, str(tmp_path / "key.json"))
        with pytest.raises(ConfigError, match=r"run.store = 'gs://.*cannot be opened.*Fix: corr"):
            objects_at(address)


def test_one_run_at_a_time(address):
    with Lease(objects_at(address), print, wait=False), pytest.raises(RunLocked):
        Lease(objects_at(address), print, wait=False)
    Lease(objects_at(address), print, wait=False).release()


def test_a_run_goes_there_and_back(address, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpar.stores.objects.PART_BYTES", 5 << 20)
    write_run(tmp_path / "run", [10, 20])
    (tmp_path / "run" / "checkpoints" / "20" / "state" / "large").write_bytes(bytes(11 << 20))
    with mirrored(address, tmp_path / "run"):
        append(tmp_path / "run", 21)
    store = objects_at(address)
    assert steps.complete_steps(store) == [10, 20]
    assert text_of(store) == (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "new").mkdir()
    fetch(store, tmp_path / "new", print)
    assert read_step(tmp_path / "new", 20) == read_step(tmp_path / "run", 20)
    assert store.level("") == (
        ["checkpoints", "complete", "metrics.jsonl.parts"],
        sorted(["config.json", "lock", "session"]),
    )


def test_a_dataset_is_read_from_there(address, tmp_path):
    from jaxpar.data import stored
    from jaxpar.data.options import PrepareOptions
    from jaxpar.data.prepare.text import prepare
    from jaxpar.data.sources import open_sources

    (tmp_path / "text.txt").write_text("the quick fox " * 500)
    at = str(address._replace(prefix="data"))
    prepare(PrepareOptions(input=(str(tmp_path / "text.txt"),), output=at, holdout=0.0))
    tokens = open_sources(replace(Config(), **{"data.path": at}), "train")[0].dataset.tokens
    assert bytes(tokens[:-1].astype("u1")) == b"the quick fox " * 500
    stored.close_all()
