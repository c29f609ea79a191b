"""Long forms, run by `make soak`: 50 kills, and every way to go on in another mesh and layout."""

import itertools
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from jaxpar import checkpoint, guard
from tests.e2e import ranks

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

#: Six meshes of four devices.
MESHES = {
    "data": "--parallel.data 4",
    "replica": "--parallel.replica 2 --parallel.data 2",
    "tensor": "--parallel.tensor 2 --parallel.data 2",
    "sequence": "--parallel.sequence 2 --parallel.data 2",
    "pipeline": "--parallel.pipeline 2 --parallel.data 2 --parallel.zero 1"
    " --parallel.num-microbatches 2",
    "product": "--parallel.pipeline 2 --parallel.tensor 2 --parallel.zero 1"
    " --parallel.num-microbatches 2",
}
LAYOUTS = (1, 2, 4)

#: Of each run.
KILLS = int(os.environ.get("SOAK_KILLS", "50"))


def killed_run(config: str, run: Path, count: int, kills: int, seed: int) -> None:
    """A run whose random processes are killed so many times, at any moment, saves included."""
    rng = random.Random(seed)
    arguments = ("--restarts", "60", "--", config, "--train.num-steps", "300")
    process = ranks.launch(count, 4 // count, *arguments, "--checkpoint.every", "3")
    done = 0
    while done < kills and process.poll() is None:
        pids = ranks.children_of(process.pid)
        time.sleep(rng.choice((rng.uniform(0, 6), rng.uniform(6, 20))))
        alive = [pid for pid in pids if ranks.alive(pid)]
        if len(alive) == count:
            os.kill(rng.choice(alive), signal.SIGKILL)
            done += 1
            ranks.wait_for(lambda old=pids: ranks.children_of(process.pid) != old)
    code, said = ranks.finish(process, 3000)
    assert code == guard.EXIT_OK, said[-3000:]
    assert done == kills


@pytest.mark.parametrize("count", [2, 4])
def test_many_kills_leave_no_trace(count, write_ranks, tmp_path, train_on):
    whole, run = tmp_path / "whole", tmp_path / "run"
    config = write_ranks(tmp_path)
    more = ("--train.num-steps", "300", "--run.dir", str(whole), "--checkpoint.every", "0")
    assert train_on(4, config, *more) == guard.EXIT_OK
    killed_run(config, run, count, KILLS, seed=count)
    assert ranks.losses_of(run) == ranks.losses_of(whole)


def trained(config: str, run: Path, mesh: str, count: int, steps: int, train_on) -> None:
    """Go on to a step, under a mesh, in so many processes."""
    args = (*MESHES[mesh].split(), "--run.dir", str(run), "--checkpoint.every", "0")
    args += ("--evaluation.every", "0", "--optimizer.schedule", "constant")
    args += ("--train.num-steps", str(steps), "--checkpoint.every", "5")
    if count == 1:
        assert train_on(4, config, *args) == guard.EXIT_OK
        return
    code, said = ranks.finish(ranks.launch(count, 4 // count, "--", config, *args))
    assert code == guard.EXIT_OK, said[-3000:]


@pytest.fixture(scope="module")
def beginnings(write_ranks, tmp_path_factory, train_on):
    """(mesh, processes) -> a run of 15 steps in each."""
    folder = tmp_path_factory.mktemp("beginnings")
    config = write_ranks(folder)
    found = {}
    for mesh, count in itertools.product(MESHES, LAYOUTS):
        found[mesh, count] = folder / f"{mesh}{count}"
        trained(config, found[mesh, count], mesh, count, 15, train_on)
    return config, found


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_has_the_same_bits_in_every_layout(beginnings, mesh):
    _, found = beginnings
    for count in LAYOUTS[1:]:
        ranks.assert_same_run(found[mesh, count], found[mesh, 1])


PAIRS = list(itertools.product(MESHES, LAYOUTS))


@pytest.mark.parametrize(("mesh", "count"), PAIRS, ids=[f"{m}-{c}" for m, c in PAIRS])
def test_every_run_goes_on_in_every_mesh_and_layout(beginnings, tmp_path, train_on, mesh, count):
    config, found = beginnings
    wanted = None
    for before, layout in PAIRS:
        run = tmp_path / f"{before}{layout}"
        shutil.copytree(found[before, layout], run)
        trained(config, run, mesh, count, 20, train_on)
        assert checkpoint.saved_steps(run)[-1] == 20
        losses = ranks.losses_of(run)
        assert sorted(losses) == list(range(1, 21))
        if before == mesh and layout == 1:
            wanted = losses
    for before, layout in PAIRS:
        losses = ranks.losses_of(tmp_path / f"{before}{layout}")
        if before == mesh:
            assert losses == wanted  # the same mesh: the same bits
        values = [losses[step][0] for step in sorted(losses)]
        np.testing.assert_allclose(values, [wanted[s][0] for s in sorted(wanted)], rtol=1e-5)
