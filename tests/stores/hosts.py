"""Processes with a folder each, as on hosts that share none, which save random states to a store.

python -m tests.stores.hosts FOLDER LAST COUNT FAULT
"""

import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import jax

from jaxpar.checkpoint.loading import restore_latest
from jaxpar.checkpoint.saved import starting_step
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.config import Config, replace, serialize
from jaxpar.sharding.mesh import make_mesh
from jaxpar.stores import mirror, shards
from jaxpar.training.object_store import stored
from tests.checkpoint.test_checkpoint import random_state
from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]

#: Devices of all processes together.
NUM_DEVICES = 4


def run_hosts(
    cfg: Config, folder: Path, last: int, fault: str = "", count: int = 2
) -> tuple[list[int], list[str]]:
    """Save states of steps 2, 4, ... to `last` in processes of a folder each.

    Args:     folder: has the folders. fault: "unsent": process 1 dies before it has sent the shards
              of the last step; "uncompleted": process 0 dies before it completes it; "rewind": the
              newest checkpoint is fetched and restored at the end.
    Returns:  the exit codes, and what the processes have printed. Once one has failed, the others
              are killed.
    """
    folder.mkdir(exist_ok=True)
    for rank in range(count):
        place = folder / f"host{rank}"
        place.mkdir(exist_ok=True)
        here = serialize.to_json(replace(cfg, **{"run.dir": str(place / "run")}))
        (place / "config.json").write_text(here)
    command = [sys.executable, "-m", "tests.stores.hosts", str(folder), str(last), str(count)]
    told = subprocess.run(
        [*command, fault], cwd=ROOT, timeout=600, capture_output=True, text=True, check=False
    )
    codes = [int(code) for code in told.stdout.split()]
    assert len(codes) == count, told.stderr
    return codes, [(folder / f"host{rank}" / "told").read_text() for rank in range(count)]


def in_all(folder: Path, last: int, count: int, fault: str) -> list[int]:
    """Fork a process for each host, so that they import JAX once. Returns:  their exit codes."""
    port, pids, codes = free_port(), list[int](), dict[int, int]()
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                told = os.open(
                    folder / f"host{rank}" / "told", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                )
                os.dup2(told, 1)
                os.dup2(told, 2)
                host(folder / f"host{rank}", rank, port, last, count, fault)
                os._exit(0)
            except BaseException:  # not into the barrier at the exit
                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    until = time.monotonic() + 200
    while len(codes) < count:
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    until = min(until, time.monotonic() + 1)
            elif time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def host(place: Path, rank: int, port: int, last: int, count: int, fault: str) -> None:
    """Save the states in one process."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES // count)
    where = f"127.0.0.1:{port}"
    jax.distributed.initialize(where, count, rank, cluster_detection_method="deactivate")
    mirror.LOOK_SECONDS = 0.05
    install(fault, rank, last)
    cfg = serialize.from_json((place / "config.json").read_text())
    mesh, step = make_mesh(cfg.parallel), None
    with stored(cfg) as store:
        if starting_step(cfg) is not None:
            _, step = restore_latest(cfg, mesh)
        print("starts from", step, flush=True)
        store.begin()
        with Checkpointer(cfg, own=store.own) as saver:
            for at in range((step or 0) + 2, last + 1, 2):
                assert saver.save(random_state(cfg, mesh, at), at, tokens_seen=0)
        if fault == "rewind":
            store.bring_newest()
            _, step = restore_latest(cfg, mesh)
            print("rewound to", step, flush=True)
    jax.distributed.shutdown()


def install(fault: str, rank: int, last: int) -> None:
    """Let this process die at the last step."""
    owner, name, of = {
        "unsent": (shards.ProcessShards, "send", 1),
        "uncompleted": (shards, "complete", 0),
    }.get(fault, (None, "", -1))
    if rank == of:
        then = getattr(owner, name)
        setattr(owner, name, lambda *args: os._exit(9) if last in args else then(*args))


if __name__ == "__main__":
    print(*in_all(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
