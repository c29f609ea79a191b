"""Damage in a store: what tests/checkpoint and tests/e2e do to files, done to objects."""

import contextlib
import errno
import random
import shutil

import pytest

from jaxpar.checkpoint import inspection as stored_checkpoints
from jaxpar.config import Config, ConfigError, replace
from jaxpar.data import stored as stored_folder
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.text import prepare
from jaxpar.data.sources import open_sources
from jaxpar.data.stored import whole_address
from jaxpar.runtime.exit_codes import RunError
from jaxpar.stores import objects as objects_room
from jaxpar.stores import steps
from jaxpar.stores.fetching import StepsDamaged, fetch
from jaxpar.stores.lease import LEASE_SECONDS, Lease
from jaxpar.stores.objects import Altered, StoreError
from jaxpar.stores.reading import for_reading, runs_at
from tests.e2e import damage
from tests.slow import slow
from tests.stores.folders import read_step, write_run, write_step
from tests.stores.server import objects_at
from tests.stores.test_mirror import mirrored


@pytest.fixture
def run(address, tmp_path, s3):
    """A run with checkpoints 10 and 20, in the store."""
    write_run(tmp_path / "run", [])
    for step in (10, 20):
        write_step(tmp_path / "run", step, size=3000)
    with mirrored(address, tmp_path / "run"):
        pass
    return tmp_path / "run"


def sizes(store, step: int) -> dict[str, int]:
    return {one.name: one.size for one in store.names(f"checkpoints/{step}/") if one.size}


@pytest.mark.parametrize("count", [3, slow(100)])
def test_each_flipped_bit_is_found_and_named(run, store, tmp_path, count):
    names, noise = sizes(store, 20), random.Random(0)
    for _ in range(count):
        (name,) = noise.choices(list(names), list(names.values()))
        content = store.read(name)[0]
        changed = bytearray(content)
        changed[noise.randrange(len(changed))] ^= 1 << noise.randrange(8)
        store.write(name, bytes(changed))
        with pytest.raises(Altered, match=f"^{name} has different content$"):
            steps.download_step(store, tmp_path / "copy", 20)
        assert not read_step(tmp_path / "copy", 20)
        store.write(name, content)
    steps.download_step(store, tmp_path / "copy", 20)
    assert read_step(tmp_path / "copy", 20) == read_step(run, 20)


@pytest.mark.parametrize(
    "how", ["truncated", slow("deleted"), slow("swapped"), slow("of another step")]
)
def test_every_object_is_missed(run, store, tmp_path, how):
    names = list(sizes(store, 20))
    for name in names:
        content = store.read(name)[0]
        match how:
            case "truncated":
                store.write(name, content[:-1])
            case "deleted":
                store.delete([name])
            case "swapped":
                store.write(name, store.read(names[names.index(name) - 1])[0])
            case _:
                store.write(name, store.read(name.replace("/20/", "/10/"))[0])
        with pytest.raises(Altered, match=f"^{name} (has|is missing)"):
            steps.download_step(store, tmp_path / "copy", 20)
        store.write(name, content)


def test_an_object_that_is_too_many_is_ignored(run, store, tmp_path):
    store.write("checkpoints/20/.DS_Store", b"")
    store.write("checkpoints/20/state/d/left", b"over")
    steps.download_step(store, tmp_path / "copy", 20)
    assert read_step(tmp_path / "copy", 20) == read_step(run, 20)


def test_without_a_whole_one_the_damage_is_named_and_nothing_is_deleted(run, store, tmp_path):
    for step in (10, 20):
        store.write(f"checkpoints/{step}/state/d/0123", b"")
    before = store.names()
    (tmp_path / "new").mkdir()
    with pytest.raises(StepsDamaged, match=r"step 20: .*0123 has 0 bytes.*step 10: .*0123 has 0"):
        fetch(store, tmp_path / "new", print)
    assert [one.name for one in store.names()] == [one.name for one in before]


@pytest.mark.parametrize("fault", [500, "403", "disk"])
def test_trouble_of_the_store_or_the_host_is_no_damage(
    run, s3, store, tmp_path, monkeypatch, fault
):
    """No earlier step is taken for it."""
    (tmp_path / "new").mkdir()
    if fault == "disk":

        def full(*args, **more):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(objects_room, "open", full, raising=False)
        expected = OSError
    else:
        expected = StoreError if fault == 500 else ConfigError
        s3.failing(10_000, int(fault), "GET", "state/d/0123")
    with pytest.raises(expected):
        fetch(store, tmp_path / "new", print)
    assert not list((tmp_path / "new").glob("checkpoints/*"))
    assert not list((tmp_path / "new").glob(".downloading/*"))


def test_a_step_that_is_deleted_meanwhile_is_left_out(run, store, address, monkeypatch):
    listed = steps.listed

    def gone(objects, step):
        steps.delete_step(store, 10)
        return listed(objects, step)

    monkeypatch.setattr(steps, "listed", gone)
    rows = list(stored_checkpoints.rows_in_store(str(address)))
    assert [row.step for row in rows] == [20]


# ------------------------------------------------------------------------- at random


@pytest.fixture
def data(address, tmp_path, s3) -> Config:
    """A config with a dataset in the store."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{"the quick fox " * i}"}}\n' for i in range(40)))
    prepare(PrepareOptions(input=(str(text),), output=str(tmp_path / "made"), holdout=0.2))
    at = address._replace(prefix="data")
    with whole_address(str(at), overwrite=False) as folder:
        shutil.copytree(tmp_path / "made", folder, dirs_exist_ok=True)
    yield replace(Config(), **{"data.path": str(at)})
    stored_folder.close_all()


def told(call) -> None:
    """What a program does: it works, or ends with one line."""
    with contextlib.suppress(ConfigError, RunError):
        call()


def damaged(store, name: str, count: int):
    """Damage an object at random, again and again. At the end it is as it was."""
    content = store.read(name)[0]
    for number in range(count):
        noise = random.Random(f"{name} {number}")
        bytes_only = name == "session"
        store.write(name, noise.randbytes(9) if bytes_only else damage.of_json(content, noise))
        yield
    store.write(name, content)


@pytest.mark.parametrize("count", [1, slow(200)])
def test_random_damage_of_a_run_is_no_traceback(run, store, address, tmp_path, count, monkeypatch):
    whole = read_step(run, 20)
    for name in ("complete/20", "session", "config.json"):
        for _ in damaged(store, name, count):
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
            shutil.rmtree(tmp_path / "new", ignore_errors=True)
            (tmp_path / "new").mkdir()
            told(lambda: fetch(store, tmp_path / "new", print))
            told(lambda: for_reading("RUN", str(address), print))
            told(lambda: list(stored_checkpoints.rows_in_store(str(address))))
            told(lambda: runs_at("FOLDER", str(address), 1))
            found = read_step(tmp_path / "new", 20)
            assert found in ({}, whole) or set(found.items()) < set(whole.items())
            assert {path.name for path in tmp_path.iterdir()} <= {"run", "new", "cache"}
    monkeypatch.setattr("jaxpar.stores.lease.LEASE_SECONDS", LEASE_SECONDS / 1e5)
    monkeypatch.setattr("jaxpar.stores.lease.POLL_SECONDS", 0.0)
    for _ in damaged(store, "lock", count):
        told(lambda: Lease(store, print).release())


@pytest.mark.parametrize("count", [1, slow(200)])
def test_random_damage_of_parts_of_lines_keeps_a_beginning(run, store, address, tmp_path, count):
    (run / "metrics.jsonl").write_bytes(lines := b'{"step": 1}\n{"step": 2}\n')
    with mirrored(address, run):
        pass
    (name,) = [one.name for one in store.names("metrics.jsonl.parts/")]
    content = store.read(name)[0]
    for number in range(count):
        store.write(name, damage.of_bytes(content, random.Random(number)))
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        folder = for_reading("RUN", str(address), print, checkpoints=False)
        file = folder / "metrics.jsonl"
        found = len(file.read_bytes()) if file.exists() else 0
        assert found in (0, len(lines))  # of another length, it is left out
    store.write("metrics.jsonl.parts/strange", b"")
    store.write("metrics.jsonl.parts/000000000005-000000000002", b"")
    told(lambda: for_reading("RUN", str(address), print, checkpoints=False))


@pytest.mark.parametrize("count", [1, slow(200)])
def test_random_damage_of_a_dataset_gives_no_wrong_token(data, address, tmp_path, count):
    store = objects_at(address._replace(prefix="data"))
    here = replace(data, **{"data.path": str(tmp_path / "made")})
    wanted = open_sources(here, "train")[0].dataset.tokens[:].tolist()
    for name in ("meta.json", "stored_files.json", "train.bin", "train.bin.checksums"):
        content = store.read(name)[0]
        for number in range(count):
            noise = random.Random(f"{name} {number}")
            change = damage.of_json if name.endswith(".json") else damage.of_bytes
            store.write(name, change(content, noise))
            stored_folder.close_all()
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)

            def read():
                return open_sources(data, "train")[0].dataset.tokens[:].tolist()

            found = wanted
            with contextlib.suppress(ConfigError, RunError):
                found = read()
            changed = store.read(name)[0] != content
            assert found == wanted or (name == "meta.json" and changed), (name, number)
        store.write(name, content)


def test_all_damaged_ends_a_run_with_code_1(run, store, address, train_on, config_file):
    for step in (10, 20):
        store.write(f"checkpoints/{step}/state/d/0123", b"")
    with pytest.raises(RunError, match=r"every checkpoint of s3://.* is damaged"):
        train_on(1, config_file, f"--run.dir={address}")
    Lease(store, print, wait=False).release()  # it was released
