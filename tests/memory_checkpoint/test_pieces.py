"""Copies in memory: what was copied comes back bit for bit, on any mesh, from whichever hosts."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar import config
from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.saved import read_saved
from jaxpar.config import Config, MemoryConfig, Router
from jaxpar.config.validate import resolve
from jaxpar.data.skips import SkippedBatches, write_skipped
from jaxpar.memory_checkpoint.places import MIRRORED, Group, MemoryPlace
from jaxpar.memory_checkpoint.plan import plan_copies
from jaxpar.memory_checkpoint.restoring import find, restore
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import abstract_logical
from tests.checkpoint.test_checkpoint import (
    assert_same_bits,
    logical,
    random_state,
    save,
    write_dataset,
)
from tests.memory_checkpoint.hosts import fake_hosts, folders_of, numbers
from tests.slow import slow_but
from tests.tiny import EXPERTS, STATE

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

BALANCED = dataclasses.replace(EXPERTS, router=Router(balancing_bias=True))
OF_EXPERTS = {"model.layers.feed_forward": BALANCED}
DATA_4 = {"parallel.data": 4}
STAGES = {"parallel.pipeline": 2, "parallel.num_microbatches": 2, "parallel.zero": 1}


@pytest.fixture
def setup(tmp_path, devices):
    """(fields of the config) -> (the resolved config, its mesh)."""
    data = write_dataset(tmp_path / "data")
    places = {"run.dir": str(tmp_path / "run"), "data.path": data, "parallel.data": 1}

    def make(**values):
        cfg = config.replace(Config(), **STATE | places | {"checkpoint.memory.every": 1} | values)
        p = cfg.parallel
        n = p.pipeline * p.replica * p.data * p.expert * p.sequence * p.tensor
        return resolve(cfg, n), make_mesh(cfg.parallel, devices[:n])

    return make


UNEQUAL = {
    "model.vocab_size": 48,
    "parallel.pipeline": 3,
    "parallel.num_microbatches": 2,
    "parallel.zero": 1,
}

MOVES = {
    "data to tensor": (DATA_4, {"parallel.tensor": 2, "parallel.data": 2}),
    "tensor to stages": ({"parallel.tensor": 2, "parallel.data": 2}, STAGES),
    "virtual to unequal stages": (
        STAGES | {"parallel.virtual_stages": 2, "model.vocab_size": 48},
        UNEQUAL,
    ),
    "unequal stages to data": (UNEQUAL, {"model.vocab_size": 48, "parallel.data": 2}),
    "experts": (
        OF_EXPERTS | {"parallel.expert": 4},
        OF_EXPERTS | {"parallel.expert": 2, "parallel.tensor": 2},
    ),
    "replicas with an average": (
        {"parallel.replica": 2, "parallel.data": 2, "optimizer.ema.decay": 0.9},
        {"parallel.data": 8, "optimizer.ema.decay": 0.9},
    ),
    "moments on the host": (DATA_4 | {"optimizer.offload": True}, DATA_4),
    "small moments": (
        DATA_4
        | {"optimizer.first_moment_dtype": "bfloat16", "optimizer.second_moment_dtype": "bfloat16"},
        {"parallel.data": 2},
    ),
}
QUICK = ["data to tensor"]


@pytest.mark.parametrize("name", slow_but(QUICK, MOVES))
def test_every_mesh_reads_the_copy_of_every_other(setup, tmp_path, name):
    """Of two hosts, with two processes each; the reader is on one of them, then on a third."""
    one, other = MOVES[name]
    cfg, mesh = setup(**one)
    running = random_state(cfg, mesh, 7)
    expected = logical(running, cfg)
    with fake_hosts(tmp_path / "hosts", 3) as hosts:
        group = Group(7, "0123abcd", 0)
        hosts.first(2).copy(cfg, running, group, processes=2 if mesh.size < 4 else 4)
        cfg, mesh = setup(**other)
        for host in (1, 2):
            place = hosts.place(host)
            (found,) = find(cfg, place)
            assert found.group == (7, "0123abcd", 0) and found.saved.tokens_seen == 100
            assert_same_bits(logical(restore(cfg, mesh, place, found), cfg), expected)


def test_on_the_same_mesh_a_running_state_is_the_same(setup, tmp_path):
    cfg, mesh = setup(**DATA_4)
    running = random_state(cfg, mesh, 7)
    with fake_hosts(tmp_path / "hosts", 1) as hosts:
        hosts.copy(cfg, running, Group(7, "0123abcd", 0), copies=0)
        restored = restore(cfg, mesh, hosts.place(0), find(cfg, hosts.place(0))[0])
    assert_same_bits(restored, running)
    assert jax.tree.map(lambda a: a.sharding, restored) == jax.tree.map(
        lambda a: a.sharding, running
    )


@pytest.mark.parametrize("copies, receivers", [(0, ""), (1, "c:1"), (2, "c:1 a:1"), (5, "c:1 a:1")])
def test_memory_copies_says_how_many_hosts_get_the_pieces(setup, tmp_path, copies, receivers):
    """The next ones after this host, which is the second of three; no host gets its own."""
    cfg, mesh = setup(**{"checkpoint.memory": MemoryConfig(every=5, copies=copies)})
    place = MemoryPlace(folders_of(tmp_path, 1)[0], ("a:1", "b:1", "c:1"), host=1)
    plan = plan_copies(cfg, place, abstract_logical(cfg, mesh).saved, seconds=60)
    assert plan.receivers == receivers.split()
    assert (plan.pieces.single.num_bytes > 0) == (copies > 0)


def test_a_host_holds_each_part_once_and_replicas_are_not_sent(setup, tmp_path):
    whole = {}
    for name, fields in {
        "sharded": {"parallel.data": 4},
        "replicas": {"parallel.replica": 2, "parallel.data": 2},
    }.items():
        cfg, mesh = setup(**fields)
        running = random_state(cfg, mesh, 7)
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(running))
        with fake_hosts(tmp_path / name, 2) as hosts:
            pieces = hosts.copy(cfg, running, Group(7, "0123abcd", 0), processes=4)
            whole[name] = [
                sum(p.single.num_bytes for p in pieces) / total,
                sum(p.shared.num_bytes for p in pieces) / total,
            ]
            assert bool(hosts.files(0, MIRRORED)) == (name == "sharded")
    # A state of which each host has a half, but for norms; and two hosts, which have all of it.
    assert 0.9 < whole["sharded"][0] <= 1 and whole["sharded"][1] < 0.3
    assert whole["replicas"][0] == 0 and 2 <= whole["replicas"][1] < 2.2
    assert numbers(running)


# ------------------------------------------------------------------------------ damage


@pytest.fixture
def copied(setup, tmp_path):
    """Two copies of two hosts, of steps 7 and 9, and the checkpoint of step 5."""
    cfg, mesh = setup(**DATA_4)
    save(cfg, mesh, 5)
    with fake_hosts(tmp_path / "hosts", 2) as hosts:
        for number, step in enumerate((7, 9)):
            hosts.copy(cfg, random_state(cfg, mesh, step), Group(step, "0123abcd", number))
        yield cfg, mesh, hosts


#: The file of the first process in the copy of step 9, without the kind of its pieces.
OF_9 = "step_0000000009.0123abcd.1.0"


def steps_found(cfg, hosts, host=0) -> list[int]:
    return [found.group.step for found in find(cfg, hosts.place(host))]


def flip(path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def assert_restores(cfg, mesh, hosts, step: int, host: int = 0) -> None:
    (found, *_) = find(cfg, hosts.place(host))
    assert found.group.step == step
    state = restore(cfg, mesh, hosts.place(host), found)
    assert_same_bits(logical(state, cfg), logical(random_state(cfg, mesh, step), cfg))


@pytest.mark.slow
def test_a_lost_host_is_replaced_by_its_copy(copied, capfd):
    cfg, mesh, hosts = copied
    assert steps_found(cfg, hosts) == [9, 7]
    hosts.lose(0)
    assert steps_found(cfg, hosts, 1) == [9, 7]
    assert_restores(cfg, mesh, hosts, 9, host=1)
    assert_restores(cfg, mesh, hosts, 9, host=0)  # which has nothing itself
    hosts.lose(1)
    assert steps_found(cfg, hosts) == []
    assert "is not used" not in capfd.readouterr().err


def test_damage_is_found_and_another_copy_read(copied, capfd):
    cfg, mesh, hosts = copied
    (own,) = (file for file in hosts.files(0) if file.name == f"{OF_9}.single")
    for damage in ("a flipped bit", "a damaged index", "a short file"):
        content = own.read_bytes()
        if damage == "a flipped bit":
            flip(own, 100)
        elif damage == "a damaged index":
            flip(own, len(content) - 100)
        else:
            own.write_bytes(content[: len(content) // 2])
        assert_restores(cfg, mesh, hosts, 9)
        said = capfd.readouterr().err
        assert f"{own}" in said and "this file is not used" in said, damage
        own.write_bytes(content)
    assert_restores(cfg, mesh, hosts, 9)
    assert "WARNING" not in capfd.readouterr().err


def test_without_a_whole_copy_an_older_one_or_the_disk_is_used(copied, capfd):
    cfg, mesh, hosts = copied
    for host, kind in ((0, "own"), (1, "mirrored")):
        for file in hosts.files(host, kind):
            if file.name == f"{OF_9}.single":
                file.unlink()
    assert steps_found(cfg, hosts) == [7]
    said = capfd.readouterr().err
    assert "the copy of step 9 in memory is not used: 27 of 43 arrays are not complete" in said
    # Of a copy whose pieces are damaged wherever they are, the arrays tell.
    for host, kind in ((0, "own"), (1, "mirrored")):
        for file in hosts.files(host, kind):
            if file.name.startswith("step_0000000007") and file.name.endswith(".0.single"):
                flip(file, 100)
    (found,) = find(cfg, hosts.place(0))
    with pytest.raises(Damaged, match=r"step 7 in memory .*: a part of .* no host"):
        restore(cfg, mesh, hosts.place(0), found)


def test_only_what_continues_the_run_is_used(copied, capfd):
    cfg, mesh, hosts = copied
    never = config.replace(cfg, **{"checkpoint.resume": "never"})
    assert find(never, hosts.place(0)) == []
    save(cfg, mesh, 8)
    assert steps_found(cfg, hosts) == [9]  # the checkpoint is newer than the other
    skipped = SkippedBatches().after_rewind(6, 2)
    write_skipped(Path(cfg.run.dir), skipped)
    assert steps_found(cfg, hosts) == []
    assert "it skips no batches, and the run batches 6 to 7" in capfd.readouterr().err
    hosts.copy(cfg, random_state(cfg, mesh, 9), Group(9, "0123abcd", 2), skipped=skipped)
    assert steps_found(cfg, hosts) == [9]


def test_a_host_that_does_not_answer_is_said_so(copied, capfd):
    cfg, mesh, hosts = copied
    hosts.peers = ("127.0.0.1:1", hosts.peers[1])
    assert_restores(cfg, mesh, hosts, 9, host=1)
    assert "host 0 does not answer: 127.0.0.1:1" in capfd.readouterr().err


def test_metadata_is_that_of_a_checkpoint(copied):
    cfg, mesh, hosts = copied
    (found, _) = find(cfg, hosts.place(1))
    on_disk = read_saved(cfg.run.dir, 5)
    assert found.saved.config == on_disk.config and found.saved.dataset == on_disk.dataset
    assert json.loads(json.dumps(found.saved.versions)) == on_disk.versions
    assert found.saved.fingerprints.keys() == on_disk.fingerprints.keys()
    assert np.unique([*found.saved.fingerprints.values()]).size > 10
