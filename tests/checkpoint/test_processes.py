"""Two processes save together: the same fingerprints as one, and one decision about damage."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar import config
from jaxpar.checkpoint.loading import restore
from jaxpar.checkpoint.saved import read_saved, saved_steps
from jaxpar.config import serialize
from tests.checkpoint.test_checkpoint import assert_same_bits, base, random_state, save, setup
from tests.ranks import free_port

__all__ = ["base", "setup"]  # fixtures

ROOT = Path(__file__).resolve().parents[2]

RANK = """
import os, sys, traceback, jax
def at_once(*error):  # not into the barrier at the exit, where the other would be waited for
    traceback.print_exception(*error)
    os._exit(1)
sys.excepthook = at_once
number, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, number, cluster_detection_method="deactivate")
from pathlib import Path
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.config import serialize
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.replica_check import ReplicaCheck
from tests.checkpoint.test_checkpoint import random_state
from tests.checkpoint.test_damage import damage_array
cfg = serialize.from_json(Path(sys.argv[3]).read_text())
mesh = make_mesh(cfg.parallel)
with Checkpointer(cfg) as saver:
    for step in (2, 4):
        now = random_state(cfg, mesh, step)
        assert saver.save(now, step, tokens_seen=0)
assert ReplicaCheck(cfg, mesh)(now) == []
jax.experimental.multihost_utils.sync_global_devices("saved")
if number == 0:
    damage_array(cfg, 4)
jax.experimental.multihost_utils.sync_global_devices("damaged")
state, step = checkpoint.restore_latest(cfg, mesh)
assert step == 2, step
print("restored", step, flush=True)
jax.distributed.shutdown()
"""


@pytest.mark.waits
@pytest.mark.slow
def test_two_processes_write_what_one_would(setup, tmp_path):
    cfg, mesh = setup(**{"parallel.data": 2, "parallel.tensor": 2})
    file = tmp_path / "config.json"
    file.write_text(serialize.to_json(cfg))
    command = [sys.executable, "-c", RANK]
    arguments = [str(free_port()), str(file)]
    ranks = [
        subprocess.Popen(
            [*command, str(number), *arguments],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for number in range(2)
    ]
    try:
        told = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)
    assert all("restored 2" in text for text in told)
    assert sum("WARNING    the checkpoint of step 4" in text for text in told) == 1
    assert saved_steps(cfg.run.dir) == [2]
    together = read_saved(cfg.run.dir).fingerprints
    assert_same_bits(restore(cfg, mesh), random_state(cfg, mesh, 2))
    alone = config.replace(cfg, **{"run.dir": str(tmp_path / "alone")})
    save(alone, mesh, 2)
    assert read_saved(alone.run.dir).fingerprints == together
