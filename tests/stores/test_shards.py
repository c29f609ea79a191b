"""Shards of several processes become one checkpoint in the store, or none."""

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorstore

from jaxpar.checkpoint import integrity
from jaxpar.checkpoint import stored_arrays as arrays_of
from jaxpar.checkpoint.shards import LAYOUT, is_array, join
from jaxpar.stores import steps
from jaxpar.stores.files import begin_session
from jaxpar.stores.lease import Lease
from jaxpar.stores.mirror import Keeping, Mirror, ShardMirror
from jaxpar.stores.objects import Altered
from jaxpar.stores.shards import ProcessShards, finish, folder_name
from tests.stores.server import objects_at
from tests.stores.test_mirror import soon

CHUNK = 64


def array_spec(place: Path, count: int) -> dict:
    files = {"driver": "file", "path": f"{place}/"}
    grid = {"name": "regular", "configuration": {"chunk_shape": [CHUNK]}}
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": files, "path": "params.w/"},
        "metadata": {"shape": [count * CHUNK], "data_type": "float32", "chunk_grid": grid},
    }


def write_shards(folder: Path, rank: int, count: int, step: int, seed: int = 0) -> None:
    """Write what Orbax leaves of one process: its chunk of an array, and an index of that."""
    place = folder / "checkpoints" / str(step)
    state, own = place / "state", place / "state" / f"ocdbt.process_{rank}"
    own.mkdir(parents=True)
    context = tensorstore.Context()
    array = tensorstore.open(array_spec(own, count), create=True, context=context).result()
    values = np.arange(CHUNK, dtype=np.float32) + 1000 * rank + seed
    array[rank * CHUNK : (rank + 1) * CHUNK].write(values).result()
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{own}/"}}
    source = tensorstore.KvStore.open(spec, context=context).result()
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{state}/"}}
    index = tensorstore.KvStore.open(spec, context=context).result()
    source.experimental_copy_range_to(index).result()
    about = {"custom_metadata": {"fingerprints": {"params/w": f"{step} {seed}"}}, "rank": rank}
    (place / "_CHECKPOINT_METADATA").write_text(json.dumps(about))
    (place / "commit_success.txt").write_text("x")
    (state / "_METADATA").write_text("{}")
    integrity.write_file_list(place)


def processes(address, folder: Path, count: int, session: str = "a") -> list[ProcessShards]:
    return [
        ProcessShards(objects_at(address), folder / str(rank), (rank, count), session, LAYOUT)
        for rank in range(count)
    ]


def read_whole(folder: Path, step: int, count: int) -> np.ndarray:
    place = folder / "checkpoints" / str(step)
    assert integrity.has_file_list(place)
    assert not integrity.file_damage(place) and not integrity.extra_files(place)
    spec = array_spec(arrays_of.array_folder(place), count)
    return tensorstore.open(spec, read=True).result().read().result()


def expected(count: int, seed: int = 0) -> np.ndarray:
    return np.concatenate([np.arange(CHUNK) + 1000 * rank + seed for rank in range(count)])


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_is_complete_once_all_have_sent_their_shards(address, store, tmp_path, count):
    made = processes(address, tmp_path, count)
    for rank in range(count):
        write_shards(tmp_path / str(rank), rank, count, 10)
    for rank in reversed(range(1, count)):
        assert made[0].complete(10, lambda: None) is None
        assert rank in made[0].missing(10) and steps.complete_steps(store) == []
        assert made[rank].send(10) == made[rank].send(10) > 0
    assert made[0].complete(10, lambda: None) > 0
    assert steps.complete_steps(store) == [10] and not store.names("shards/")
    listed = steps.listed(store, 10)
    assert {f"checkpoints/10/{n}" for n in listed} == {o.name for o in store.names("checkpoints/")}
    assert sum(map(is_array, listed)) >= count
    assert not [name for name in listed if "success" in name or name.endswith("0/manifest.ocdbt")]
    steps.download_step(store, tmp_path / "copy", 10)
    np.testing.assert_array_equal(read_whole(tmp_path / "copy", 10, count), expected(count))


def test_shards_of_two_saves_are_not_joined(address, store, tmp_path):
    """Of another attempt, of other values, of another number of processes."""
    write_shards(tmp_path / "0", 0, 2, 10)
    write_shards(tmp_path / "1", 1, 2, 10)
    made = processes(address, tmp_path, 2)
    processes(address, tmp_path, 2, session="before")[1].send(10)
    processes(address, tmp_path, 3)[1].send(10)
    shutil.rmtree(tmp_path / "1")
    write_shards(tmp_path / "1", 1, 2, 10, seed=5)
    made[1].send(10)
    assert made[0].complete(10, lambda: None) is None and made[0].missing(10) == [1]
    shutil.rmtree(tmp_path / "1")
    write_shards(tmp_path / "1", 1, 2, 10)
    made[1].send(10)
    assert made[0].complete(10, lambda: None)
    steps.download_step(store, tmp_path / "copy", 10)
    np.testing.assert_array_equal(read_whole(tmp_path / "copy", 10, 2), expected(2))


@pytest.mark.parametrize("damage", ["missing", "truncated", "list", "index"])
def test_damaged_shards_complete_nothing(address, store, tmp_path, damage):
    for rank in range(2):
        write_shards(tmp_path / str(rank), rank, 2, 10)
    if damage == "index":
        for node in (tmp_path / "1/checkpoints/10/state/d").iterdir():
            node.write_bytes(os.urandom(node.stat().st_size))
    made = processes(address, tmp_path, 2)
    made[1].send(10)
    of_1 = max(store.names("checkpoints/10/"), key=lambda one: one.size).name
    (list_1,) = [one.name for one in store.names("shards/10/")]
    if damage == "missing":
        store.delete([of_1])
    if damage == "truncated":
        store.write(of_1, store.read(of_1)[0][:-1])
    if damage == "list":
        content = bytearray(store.read(list_1)[0])
        content[len(content) // 2] ^= 1
        store.write(list_1, bytes(content))
    with pytest.raises(Altered):
        made[0].complete(10, lambda: None)
    assert steps.complete_steps(store) == [] and not (tmp_path / "0/.joining").exists()


def test_processes_without_an_index_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no index"):
        join([{"state/_METADATA": b"{}"}], {}, tmp_path / "10")


@pytest.mark.waits
def test_threads_of_all_processes_upload_while_the_run_saves(address, store, tmp_path, capsys):
    made, said = processes(address, tmp_path, 3), []
    run = tmp_path / "run"
    run.mkdir()
    store.write("checkpoints/10/state/left", b"by a killed attempt")
    store.write("shards/20/x/1", b"too")
    keeping = Keeping(2, 0, lambda: 0)
    with Lease(made[0]._objects, print, wait=False) as held:
        mirror = Mirror(made[0]._objects, held, run, keeping, said.append, made[0])
        assert not store.names("checkpoints/") and not store.names("shards/")
        others = [ShardMirror(one._objects, one, print) for one in made[1:]]
        for rank in (0, 1):
            write_shards(tmp_path / str(rank), rank, 3, 10)
        soon(lambda: len(store.names("shards/10/")) == 2)
        assert mirror.late_steps() == [10] and "of steps 10" in mirror.waiting()
        write_shards(tmp_path / "2", 2, 3, 10)
        soon(lambda: steps.complete_steps(store) == [10])
        for rank in range(3):
            write_shards(tmp_path / str(rank), rank, 3, 20)
        ends = [threading.Thread(target=one.drain) for one in [mirror, *others]]
        for end in ends:
            end.start()
        for end in ends:
            end.join()
    assert steps.complete_steps(store) == [10, 20] and not store.names("shards/")
    assert any("stored step 20" in line for line in said)
    steps.download_step(store, tmp_path / "copy", 20)
    np.testing.assert_array_equal(read_whole(tmp_path / "copy", 20, 3), expected(3))


def test_a_step_that_one_process_has_deleted_does_not_stop_later_ones(address, store, tmp_path):
    made = processes(address, tmp_path, 2)
    run = tmp_path / "run"
    run.mkdir()
    with Lease(made[0]._objects, print, wait=False) as held:
        keeping = Keeping(2, 0, lambda: 0)
        mirror = Mirror(made[0]._objects, held, run, keeping, print, made[0])
        for step in (10, 20):
            write_shards(tmp_path / "0", 0, 2, step)
        soon(lambda: len(store.names("shards/")) == 2)
        write_shards(tmp_path / "1", 1, 2, 20)
        made[1].send(20)
        soon(lambda: steps.complete_steps(store) == [20])
        shutil.rmtree(tmp_path / "0/checkpoints/10")
        soon(lambda: not store.names("checkpoints/10/") and not store.names("shards/"))
        assert mirror.drain(5.0)


@pytest.mark.parametrize("kind", ["whole", "one lost", "another save", "outdated", "other session"])
def test_a_later_attempt_completes_what_is_on_the_disks(address, store, tmp_path, kind):
    run, said = tmp_path / "run", ["before", "later"][kind == "other session"]
    begin_session(store, run, said)
    store.write("session", b"before")
    for rank in range(2):
        place = run / folder_name(rank, 2)
        write_shards(place, rank, 2, 10)
        write_shards(place, rank, 2, 20, seed=rank * (kind == "another save"))
    if kind == "one lost":
        shutil.rmtree(run / folder_name(1, 2) / "checkpoints/20")
    if kind == "outdated":
        store.write("complete/30", b"{}")
    with Lease(store, print, wait=False) as held:
        finish(store, run, held, LAYOUT, 10.0)
    completed = {"whole": 20, "one lost": 10, "another save": 10}.get(kind)
    assert [step for step in steps.complete_steps(store) if step < 30] == (
        [] if completed is None else [completed]
    )
    assert not store.names("shards/")
    if completed is not None:
        steps.download_step(store, tmp_path / "copy", completed)
        np.testing.assert_array_equal(read_whole(tmp_path / "copy", completed, 2), expected(2))
