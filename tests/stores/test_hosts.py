"""Hosts that share no folder: each uploads its shards, and the store has whole checkpoints."""

import shutil

import pytest

from jaxpar.checkpoint import inspection
from jaxpar.checkpoint.loading import restore
from jaxpar.checkpoint.saved import saved_steps
from jaxpar.config import replace
from jaxpar.stores import steps
from jaxpar.stores.reading import for_reading
from tests.checkpoint.test_checkpoint import assert_same_bits, base, random_state, setup
from tests.stores.hosts import run_hosts

pytestmark = pytest.mark.slow  # quicker: test_shards.py

__all__ = ["base", "setup"]  # fixtures

FIELDS = {"parallel.data": 2, "parallel.tensor": 2, "optimizer.name": "sgd"}


@pytest.fixture
def of_hosts(setup, address):
    """(the config of a run in the store, its mesh)"""
    cfg, mesh = setup(**FIELDS)
    return replace(cfg, **{"run.store": str(address)}), mesh


def same_as_saved(address, cfg, mesh, step: int) -> None:
    """Check that any reader of the store finds what the two processes have saved."""
    folder = for_reading("RUN", str(address), print)
    assert saved_steps(folder)[-1] == step
    assert inspection.verify(folder, step, print)
    here = replace(cfg, **{"run.dir": str(folder), "run.store": ""})
    assert_same_bits(restore(here, mesh, step), random_state(here, mesh, step))


def test_two_hosts_without_a_shared_folder_write_what_one_would(of_hosts, address, store, tmp_path):
    cfg, mesh = of_hosts
    codes, told = run_hosts(cfg, tmp_path, 4)
    assert codes == [0, 0], "\n".join(told)
    assert "2 hosts have a folder each" in told[0] and "stored step 4: " in told[0]
    assert steps.complete_steps(store) == [2, 4] and not store.names("shards/")
    files = steps.listed(store, 4)
    assert {name.split("/")[1] for name in files if "ocdbt.process" in name} == {
        "ocdbt.process_0",
        "ocdbt.process_1",
    }
    assert {one.name for one in store.names("checkpoints/4/")} == {
        f"checkpoints/4/{name}" for name in files
    }
    same_as_saved(address, cfg, mesh, 4)


@pytest.mark.parametrize("count", [2, 4])
def test_other_hosts_continue_from_the_store(of_hosts, address, store, tmp_path, count):
    cfg, mesh = of_hosts
    assert run_hosts(cfg, tmp_path, 4)[0] == [0, 0]
    codes, told = run_hosts(cfg, tmp_path / "new", 6, count=count)
    assert codes == [0] * count, "\n".join(told)
    assert all("starts from 4" in text for text in told)
    assert steps.complete_steps(store) == [2, 4, 6]
    same_as_saved(address, cfg, mesh, 6)


@pytest.mark.parametrize(
    ("fault", "hosts"),
    [
        ("unsent", "others"),
        ("unsent", "same"),
        ("uncompleted", "others"),
        ("uncompleted", "swapped"),
        ("uncompleted", "one lost"),
    ],
)
def test_a_step_that_not_all_have_sent_is_absent(of_hosts, address, store, tmp_path, fault, hosts):
    """The next attempt completes it, if all its shards are on the disks of its hosts."""
    cfg, mesh = of_hosts
    codes, told = run_hosts(cfg, tmp_path / "a", 4, fault)
    assert 9 in codes, "\n".join(told)
    assert steps.complete_steps(store) == [2] and store.names("checkpoints/4/")
    same_as_saved(address, cfg, mesh, 2)
    first, second = tmp_path / "a/host0", tmp_path / "a/host1"
    if hosts == "others":
        shutil.rmtree(tmp_path / "a")
    if hosts == "one lost":
        shutil.rmtree(second)
    if hosts == "swapped":
        first.rename(tmp_path / "x")
        second.rename(first)
        (tmp_path / "x").rename(second)
    codes, told = run_hosts(cfg, tmp_path / "a", 4)
    assert codes == [0, 0], "\n".join(told)
    finishes = hosts in ("same", "swapped")
    assert all(f"starts from {4 if finishes else 2}\n" in text for text in told)
    assert ("uploading  step 4 of an earlier attempt, from 2 hosts" in told[0]) == finishes
    assert steps.complete_steps(store) == [2, 4] and not store.names("shards/")
    assert {one.name for one in store.names("checkpoints/4/")} == {
        f"checkpoints/4/{name}" for name in steps.listed(store, 4)
    }
    same_as_saved(address, cfg, mesh, 4)


def test_a_rewind_fetches_the_newest_checkpoint(of_hosts, tmp_path):
    cfg, _ = of_hosts
    codes, told = run_hosts(cfg, tmp_path, 4, "rewind")
    assert codes == [0, 0], "\n".join(told)
    assert all("rewound to 4" in text for text in told)
