"""Measure saves: python scripts/measure/saves.py CONFIG.json [--saves N] [--one-on-disk]

CONFIG.json is the config.json of a run, whose folder is overwritten. Saves a state of its shape N
times, as training does, and restores it at the end. Prints for each save how long the loop waits,
the time of a plain copy to the host, bytes per second until the save is complete, and the current
and peak resident memory.
"""

import argparse
import resource
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxpar.checkpoint.copies import HostCopy
from jaxpar.checkpoint.loading import restore
from jaxpar.checkpoint.saved import checkpoint_folder
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.config.serialize import from_json
from jaxpar.config.validate import resolve
from jaxpar.runtime import start as runtime
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import state


def resident() -> float:
    """Return the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def copy_seconds(tree) -> float:
    """Return the seconds of a plain copy to the host."""
    doubled = jax.block_until_ready(jax.jit(lambda t: jax.tree.map(lambda a: a + a, t))(tree))
    began = time.perf_counter()
    jax.device_get(doubled)
    return time.perf_counter() - began


def peak() -> float:
    """Return the peak resident memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    """Save, restore, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG.json")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument(
        "--one-on-disk", action="store_true", help="keep only one save, for small disks"
    )
    parser.add_argument("--no-copy", action="store_true", help="skip the plain copies")
    options = parser.parse_args()
    if options.saves < 1:
        parser.error(f"--saves = {options.saves}: must be at least 1. Fix: --saves 5")
    try:
        cfg = from_json(Path(options.config).read_text("utf-8"))
    except (OSError, ValueError) as error:  # a ConfigError too
        rule = f"CONFIG.json = {options.config!r}: cannot be read: {error}"
        parser.error(f"{rule}. Fix: give the config.json of a run")
    runtime.start(cfg)
    cfg = resolve(cfg, jax.device_count())
    mesh = make_mesh(cfg.parallel)
    now = state.init_state(cfg, mesh)
    step = jax.jit(lambda s: jax.tree.map(lambda a: a + jnp.ones((), a.dtype), s), donate_argnums=0)
    silent = lambda text: None  # noqa: E731
    with (
        HostCopy(vars(now)) as host,
        Checkpointer(cfg, silent, host=host) as saver,
    ):
        host.begin()
        saver.prepare(now)
        for number in range(options.saves):  # the step that the state counts
            if options.one_on_disk:
                shutil.rmtree(checkpoint_folder(cfg.run.dir) / str(number - 1), ignore_errors=True)
            copied = 0.0 if options.no_copy else copy_seconds(now)
            began = time.perf_counter()
            saver.save(now, number, 0)
            held = time.perf_counter() - began
            now = jax.block_until_ready(step(now))
            saver.wait()
            whole = time.perf_counter() - began
            num_bytes = sum(a.nbytes for a in jax.tree.leaves(now))
            print(
                f"save {number + 1}: loop waited {held:.3f} s, a plain copy {copied:.3f} s, "
                f"{num_bytes / 1e9:.2f} GB in {whole:.2f} s, {num_bytes / 1e9 / whole:.2f} GB/s, "
                f"{resident():.0f} MB resident, peak {peak():.0f}",
                flush=True,
            )
    del now
    began = time.perf_counter()
    jax.block_until_ready(restore(cfg, mesh))
    whole = time.perf_counter() - began
    print(f"restored and compared in {whole:.2f} s, {num_bytes / 1e9 / whole:.2f} GB/s")


if __name__ == "__main__":
    main()
