"""A run's folder appears in the store: files, lines, checkpoints complete or absent."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxpar.checkpoint.integrity import FILES
from jaxpar.monitoring.goodput import EVENTS_FILE
from jaxpar.monitoring.routing import LOADS_FILE
from jaxpar.monitoring.samples import SAMPLES_FILE
from jaxpar.stores import files, steps
from jaxpar.stores.lease import Lease
from jaxpar.stores.mirror import Keeping, Mirror
from jaxpar.stores.objects import Altered, Missing
from tests.stores.folders import MARK, append, read_step, write_run, write_step
from tests.stores.server import objects_at

pytestmark = pytest.mark.waits


@contextlib.contextmanager
def mirrored(address, folder: Path, keep: int = 9, every: int = 0, best: int = 0, log=print):
    objects = objects_at(address)
    with Lease(objects, print, wait=False) as held:
        keeping = Keeping(keep, every, lambda: best)
        with Mirror(objects, held, folder, keeping, log) as mirror:
            yield mirror


def soon(condition) -> None:
    """Wait until it holds. What is being replaced is missing for a moment."""
    until = time.monotonic() + 240  # ends a hang
    while True:
        with contextlib.suppress(Missing):
            if condition():
                return
        assert time.monotonic() < until
        time.sleep(0.01)


def text_of(store) -> bytes:
    content, damage = files.joined(store, "metrics.jsonl")
    assert not damage
    return content


def test_the_names_are_those_of_the_rooms_that_write_them():
    assert MARK == FILES
    assert files.GROWING == ("metrics.jsonl", EVENTS_FILE, SAMPLES_FILE, LOADS_FILE)


def test_everything_of_a_run_is_uploaded_and_nothing_else(address, store, tmp_path):
    write_run(tmp_path / "run", [10, 20])
    for name in ("lock", "ranks/0.json", "logs/rank-1.log", "damaged/5/x", "a.tmp", ".x"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("x")
    (tmp_path / "run" / "checkpoints" / "30").mkdir()  # not finished
    said = []
    with mirrored(address, tmp_path / "run", log=said.append) as mirror:
        pass
    assert mirror.drain() and not mirror.waiting()
    assert steps.complete_steps(store) == [10, 20]
    top = {one.name.split("/")[0] for one in store.names()}
    expected = {"checkpoints", "complete", "config.json", "metrics.jsonl.parts", "lock", "session"}
    assert top == expected
    assert text_of(store) == (tmp_path / "run/metrics.jsonl").read_bytes()
    for step in (10, 20):
        assert steps.download_step(store, tmp_path / "copy", step) > 20_000
        assert read_step(tmp_path / "copy", step) == read_step(tmp_path / "run", step)
    assert any("stored step 20: 0.000 GB in" in line for line in said)


def test_changes_follow_while_it_runs(address, store, tmp_path):
    folder = tmp_path / "run"
    write_run(folder, [10])
    with mirrored(address, folder):
        soon(lambda: steps.complete_steps(store) == [10])
        append(folder, 11, 12)
        (folder / "config.json").write_text("{}")
        write_step(folder, 20)
        soon(lambda: steps.complete_steps(store) == [10, 20])
        soon(lambda: text_of(store).endswith(b'{"step": 12}\n'))
        soon(lambda: store.read("config.json")[0] == b"{}")
        before = read_step(folder, 20)
        write_step(folder, 20, seed=1)  # after a rewind
        soon(lambda: steps.listed(store, 20)[MARK].sha256 not in str(before))
    steps.download_step(store, tmp_path / "copy", 20)
    assert read_step(tmp_path / "copy", 20) == read_step(folder, 20) != before


def test_many_parts_become_one(address, store, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MANY", 5)
    growing = files.Growing(store, tmp_path, "metrics.jsonl")
    for step in range(12):
        append(tmp_path, step)
        assert growing.upload() and not growing.upload()
        assert text_of(store) == (tmp_path / "metrics.jsonl").read_bytes()
    assert len(files.ranges(store, "metrics.jsonl")) <= 5
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"half')  # a line that is being written
    assert not growing.upload()


def test_the_lines_before_a_damaged_or_missing_part_are_kept(address, store, tmp_path):
    growing = files.Growing(store, tmp_path, "metrics.jsonl")
    for step in (1, 2, 3):
        append(tmp_path, step)
        growing.upload()
    names = [one.name for one in store.names("metrics.jsonl.parts/")]
    (whole, _), line = store.read(names[1]), b'{"step": 1}\n'
    store.write(names[1], whole[:-1])
    assert files.joined(store, "metrics.jsonl") == (line, f"{names[1]} has 11 bytes, not 12")
    store.delete([names[1]])
    assert files.joined(store, "metrics.jsonl") == (
        line,
        "metrics.jsonl has no bytes 12 to 24",
    )
    (tmp_path / "metrics.jsonl").write_bytes(line)  # as a download leaves it
    append(tmp_path, 2)
    assert files.Growing(store, tmp_path, "metrics.jsonl").upload() == 24
    assert text_of(store) == (tmp_path / "metrics.jsonl").read_bytes()


def test_old_checkpoints_are_deleted_as_on_the_disk(address, store, tmp_path):
    folder = tmp_path / "run"
    write_run(folder, [10, 20, 30])
    with mirrored(address, folder, keep=2, every=20, best=10):
        soon(lambda: steps.complete_steps(store) == [10, 20, 30])
        for step in (40, 50, 60):
            write_step(folder, step)
            soon(lambda step=step: step in steps.complete_steps(store))
            for old in sorted((folder / "checkpoints").iterdir()):
                if int(old.name) <= step - 20:
                    (old / MARK).unlink(missing_ok=True)
    assert steps.complete_steps(store) == [10, 20, 40, 50, 60]  # best, every 20, the latest two
    assert not store.names("checkpoints/30/")


def test_a_store_that_is_away_stops_nothing(s3, address, store, tmp_path, capsys):
    folder, said = tmp_path / "run", []
    write_run(folder, [10])
    with mirrored(address, folder, log=said.append) as mirror:
        soon(lambda: not mirror.waiting())
        s3.failing(10_000, 503)
        write_step(folder, 20)
        soon(lambda: mirror._failures > 1)
        backlog = mirror.backlog()
        assert backlog["store_waiting_steps"] == 1 and backlog["store_waiting_seconds"] > 0
        assert 20_000 < 1e9 * backlog["store_waiting_gb"] < 30_000
        assert "20" in mirror.waiting()
        s3.fault = lambda method, path: None
        soon(lambda: steps.complete_steps(store) == [10, 20])
        soon(lambda: not mirror.backlog()["store_waiting_steps"])
    assert capsys.readouterr().err.count("Training continues") == 1
    assert any("works again" in line for line in said)


def test_what_is_left_at_the_end_is_said_and_sent_by_the_next(s3, address, store, tmp_path, capsys):
    folder = tmp_path / "run"
    write_run(folder, [10])
    with mirrored(address, folder) as mirror:
        soon(lambda: not mirror.waiting())
        s3.failing(10_000, 503)
        write_step(folder, 20)
        assert not mirror.drain(0.3)
    told = capsys.readouterr().err
    assert "not in s3://" in told and "checkpoints of steps 20. It is in" in told
    s3.fault = lambda method, path: None
    store.delete(["lock"])  # it could not be released
    with mirrored(address, folder):
        pass
    assert steps.complete_steps(store) == [10, 20]


def test_nothing_is_completed_without_the_lease(address, store, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    write_run(folder, [10])
    with mirrored(address, folder) as mirror:
        soon(lambda: steps.complete_steps(store) == [10])
        mirror.lease._lost = "another run has taken it"
        write_step(folder, 20)
        assert not mirror.drain(1.0)
    assert steps.complete_steps(store) == [10]


@pytest.mark.parametrize("last", ["state/d", "complete"])
def test_an_uploader_killed_in_a_step_leaves_none(s3, address, store, tmp_path, last):
    """kill -9 between its files; the next session completes it, and deletes what is not known."""
    folder = tmp_path / "run"
    write_run(folder, [10])
    s3.fault = lambda method, path: 30.0 if method == "PUT" and f"/{last}" in path else None
    code = f"""
from pathlib import Path
from jaxpar.stores import steps
from tests.stores.server import objects_at
from jaxpar.config.rules.paths import Address
objects = objects_at(Address(*{tuple(address)!r}))
steps.upload_step(objects, Path({str(folder)!r}), 10, lambda: None)
"""
    child = subprocess.Popen([sys.executable, "-c", code], env=os.environ)
    try:
        soon(lambda: any(f"/{last}" in path for m, path in s3.requests if m == "PUT"))
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    s3.fault = lambda method, path: None
    assert store.names("checkpoints/10/") and steps.complete_steps(store) == []
    with pytest.raises(Missing):
        steps.download_step(store, tmp_path / "copy", 10)
    store.write("checkpoints/5/state/d/0", b"of another killed one")
    with mirrored(address, folder):
        pass
    assert steps.complete_steps(store) == [10] and not store.names("checkpoints/5/")
    steps.download_step(store, tmp_path / "copy", 10)
    assert read_step(tmp_path / "copy", 10) == read_step(folder, 10)


DAMAGE = {
    "truncated": (lambda content: content[:-7], "has 19,993 bytes, not 20,000"),
    "altered": (lambda content: content[:-1] + b"\0\1"[content[-1:] == b"\0" :][:1], "content"),
    "missing": (lambda content: None, "state/d/0123 is missing"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_object_is_named_and_nothing_appears(store, tmp_path, how):
    write_run(tmp_path / "run", [10])
    steps.upload_step(store, tmp_path / "run", 10, lambda: None)
    change, rule = DAMAGE[how]
    name = "checkpoints/10/state/d/0123"
    changed = change(store.read(name)[0])
    store.delete([name]) if changed is None else store.write(name, changed)
    with pytest.raises(Altered, match=rule):
        steps.download_step(store, tmp_path / "copy", 10)
    assert not read_step(tmp_path / "copy", 10)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": 1, "files": {"a": 1}}', b"\xff"])
def test_a_damaged_list_of_files_is_damage(store, tmp_path, content):
    store.write("complete/10", content)
    with pytest.raises(Altered, match="complete/10"):
        steps.download_step(store, tmp_path / "copy", 10)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x"])
def test_a_list_cannot_name_files_elsewhere(store, tmp_path, name):
    about = {"format": 1, "files": {name: {"bytes": 1, "sha256": "0"}}}
    store.write("complete/10", json.dumps(about).encode())
    with pytest.raises(Altered, match="lists"):
        steps.download_step(store, tmp_path / "copy", 10)
