"""Measure checkpoints of many shards: python scripts/measure/many_shards.py --devices 64 512 4096

Saves a small state, split over N simulated CPU devices, with Orbax and the options of a run,
and reads its metadata and its arrays again, in a new process with one device. Each number is a
process of its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxpar.checkpoint import stored_arrays
from jaxpar.config import Attention, Config, Glu, Layer, Model, replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import abstract_state, state_shardings

#: Layers of the model, in one stack. Their number changes no array's name.
LAYERS = 2


def config_of(devices: int) -> Config:
    """Return a small model of whose every matrix each device has a part."""
    layer = Layer("layers", Attention(num_heads=1, num_kv_heads=1, head_dim=16), Glu(16))
    changes = {
        "model": Model(d_model=max(64, devices), vocab_size=64, layers=[layer] * LAYERS),
        "data.seq_len": 16,
        "train.global_batch_size": devices,
        "parallel.data": devices,
    }
    return resolve(replace(Config(), **changes), devices)


def value_of(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array each of whose elements differs from its neighbors."""
    return (np.arange(np.prod(shape, dtype=int)) % 8191).astype(dtype).reshape(shape)


@contextmanager
def timed(what: str, found: dict[str, float]) -> Iterator[None]:
    """Measure seconds, and CPU seconds, of a block."""
    began, used = time.perf_counter(), time.process_time()
    yield
    found[what] = round(time.perf_counter() - began, 3)
    found[f"{what}, CPU"] = round(time.process_time() - used, 3)


def save(devices: int, arrays: int, folder: Path) -> None:
    """Save the largest arrays of a state split over devices, and print what it took."""
    found: dict[str, Any] = {"devices": devices}
    cfg = config_of(devices)
    with timed("start", found):
        mesh = make_mesh(cfg.parallel)

    def placed(leaf: Any, sharding: Any) -> jax.Array:
        whole = value_of(leaf.shape, leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, sharding, whole.__getitem__)

    with timed("state", found):
        state = jax.tree.map(placed, abstract_state(cfg), state_shardings(cfg, mesh))
        tree = jax.block_until_ready(state.saved)
    leaves = sorted(jax.tree.leaves(tree), key=lambda a: -a.nbytes)[: arrays or None]
    tree = {str(number): leaf for number, leaf in enumerate(leaves)}
    found["arrays"], found["MB"] = len(leaves), round(sum(a.nbytes for a in leaves) / 1e6, 2)
    distinct = (len({str(s.index) for s in a.addressable_shards}) for a in leaves)
    found["shards"] = sum(distinct)
    context = ocp.Context()
    context.array.saving.use_compression = False
    with timed("save", found), context:
        ocp.save(folder / "state", tree)
    sizes = {p: p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    found["files"], found["MB on disk"] = len(sizes), round(sum(sizes.values()) / 1e6, 2)
    found["largest"] = {p.name: n for p, n in sorted(sizes.items(), key=lambda i: -i[1])[:6]}
    found["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    print(json.dumps(found), flush=True)


def read(folder: Path) -> None:
    """Read what was saved, on one device, and print what it took."""
    found: dict[str, Any] = {}
    with timed("metadata", found):
        described = jax.tree.leaves(ocp.metadata(folder / "state").metadata)
    found["sharded as"] = str(described[0].sharding_metadata)[:60]
    names = stored_arrays.array_names(folder / "state")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one),
        ocp.metadata(folder / "state").metadata,
    )
    with timed("load", found):
        loaded = jax.block_until_ready(ocp.load(folder / "state", target))
    for array in jax.tree.leaves(loaded):
        np.testing.assert_array_equal(np.asarray(array), value_of(array.shape, array.dtype))
    found["equal arrays"] = len(names)
    found["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    print(json.dumps(found), flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 64, 512, 4096])
    parser.add_argument("--arrays", type=int, default=0, help="save only the largest; 0: all")
    parser.add_argument("--part", nargs=2, metavar=("save|read", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        what, folder = options.part[0], Path(options.part[1])
        devices = options.devices[0] if what == "save" else 1
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
        return save(devices, options.arrays, folder) if what == "save" else read(folder)
    for devices in options.devices:
        with tempfile.TemporaryDirectory() as folder:
            for what in ("save", "read"):
                part = ["--devices", str(devices), "--arrays", str(options.arrays)]
                part += ["--part", what, folder]
                subprocess.run([sys.executable, __file__, *part], check=True)


if __name__ == "__main__":
    main()
