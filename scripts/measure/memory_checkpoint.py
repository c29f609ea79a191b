"""Measure copies in memory: scripts/measure/memory_checkpoint.py CONFIG [--section.field value ...]

Copies a state of the config's shape to /dev/shm three times, as training does, and sends each copy
to a second piece server on this host. Then restores it from its own files, and from those of the
second server. Prints the seconds that the loop waits, and those of writing, sending and restoring.
MEMORY_FOLDER=PATH names another folder. Needs room there for three times the state.
"""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config, declared, replace
from jaxpar.config.command_line import read_config
from jaxpar.config.validate import resolve
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.text import prepare
from jaxpar.data.skips import SkippedBatches
from jaxpar.memory_checkpoint.client import LIMITS_FILE
from jaxpar.memory_checkpoint.places import MIRRORED, OWN, MemoryPlace
from jaxpar.memory_checkpoint.plan import plan_copies
from jaxpar.memory_checkpoint.restoring import find, restore
from jaxpar.memory_checkpoint.server import PieceServer
from jaxpar.memory_checkpoint.writing import MemoryCheckpointer, limits_of
from jaxpar.runtime import start as runtime
from jaxpar.runtime.processes.token import RunToken
from jaxpar.runtime.program import run_program
from jaxpar.sharding.fingerprint import fingerprints
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import state

COPIES = 3


def with_tiny_data(cfg: Config, folder: Path) -> Config:
    """Return the config with data of a few words: metadata name the data."""
    text = folder / "text.jsonl"
    text.write_text('{"text": "a few words"}\n' * 100, encoding="utf-8")
    prepare(PrepareOptions(input=(str(text),), output=str(folder / "data"), holdout=0.0))
    paths = {"data.path": str(folder / "data"), "run.dir": str(folder / "run"), "data.mixture": ()}
    return replace(cfg, **paths, **{"checkpoint.memory.every": 1})


def measure(cfg: Config, places: Sequence[MemoryPlace]) -> None:
    """Copy, restore, and print."""
    runtime.start(cfg)
    cfg = resolve(cfg, jax.device_count())
    mesh, silent = make_mesh(cfg.parallel), lambda text: None
    now = state.init_state(cfg, mesh)
    size = sum(a.nbytes for a in jax.tree.leaves(now))
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, {size / 1e9:.3f} GB of state")
    step = jax.jit(lambda s: jax.tree.map(lambda a: a + jnp.ones((), a.dtype), s), donate_argnums=0)
    plan = plan_copies(cfg, places[0], state.abstract_logical(cfg, mesh).saved, 60)
    fingerprints((now := step(now)).saved)  # compiled before the first step of a run
    with MemoryCheckpointer(cfg, plan, None, silent) as memory:
        limits = limits_of(memory.session, cfg.train.num_steps, plan.pieces.num_bytes)
        (places[1].folder / LIMITS_FILE).write_text(declared.to_json(limits))
        found: dict[str, Any] = {}
        memory.record = lambda event, **more: found.update(more)
        began = time.perf_counter()
        memory.begin()
        while not all(slot.ready for slot in memory._slots):
            time.sleep(0.01)
        print(f"memory of two copies allocated in {time.perf_counter() - began:.2f} s")
        for _ in range(COPIES):
            now = jax.block_until_ready(step(now))
            empty(places[1].folder)  # which no process of that host does here
            began = time.perf_counter()
            assert memory.save(now, int(now.step), 0, SkippedBatches())
            now = step(now)
            memory.wait()
            whole = time.perf_counter() - began
            print(
                f"the loop waited {found['loop_waited']:.3f} s, checksums and index "
                f"{found['write_seconds']:.3f} s, sent {found['sent_bytes'] / 1e9:.3f} GB in "
                f"{found['send_seconds']:.3f} s, {whole:.2f} s in all",
                flush=True,
            )
    del now
    for where in ("this host", "this host again", "the other host", "the other host again"):
        if where == "the other host":
            empty(places[0].folder)
        began = time.perf_counter()
        (copy, *_) = find(cfg, places[0])
        looked = time.perf_counter()
        jax.block_until_ready(restore(cfg, mesh, places[0], copy))
        ended = time.perf_counter()
        rate = size / 1e9 / (ended - looked)
        print(
            f"found in {looked - began:.3f} s, restored from {where} in {ended - looked:.2f} s, "
            f"{rate:.2f} GB/s, arrays compared",
            flush=True,
        )


def empty(folder: Path) -> None:
    """Delete the files of a host."""
    for kind in (OWN, MIRRORED):
        for path in (folder / kind).iterdir():
            path.unlink()


def main(argv: Sequence[str]) -> int:
    """Measure a config in two folders, which are deleted at the end."""
    cfg = read_config(list(argv))
    above = os.environ.get("MEMORY_FOLDER", "/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="jaxpar-measured-", dir=above))
    try:
        hosts = [folder / "0", folder / "1"]
        for host in hosts:
            for kind in (OWN, MIRRORED):
                (host / kind).mkdir(parents=True)
        token = RunToken(secrets.token_hex())
        servers = [PieceServer(host, "127.0.0.1", token) for host in hosts]
        with servers[0] as one, servers[1] as two:
            peers = tuple(f"127.0.0.1:{server.port}" for server in (one, two))
            places = [MemoryPlace(host, peers, i, token) for i, host in enumerate(hosts)]
            measure(with_tiny_data(cfg, folder), places)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    run_program(main)
