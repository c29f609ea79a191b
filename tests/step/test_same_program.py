"""Every process makes the same program: sets of names must not decide an order.

Python orders a set of strings anew in each process. A program in which that shows is never found in
the compilation cache, and processes of one run would compile different ones.
"""

import os
import subprocess
import sys

import pytest

LOWER = """
import hashlib, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
from jaxpar.verification import traces
from jaxpar.config import Config, replace
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import abstract_state, state_shardings
from jaxpar.step.train_step import make_train_step
from jaxpar.config.validate import resolve

small = {"num_layers": 2, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
         "d_ff": 128, "vocab_size": 256}
changes = {f"model.{name}": value for name, value in small.items()}
changes |= {"data.seq_len": 64, "train.global_batch_size": 8, "parallel.layer_loop": "unroll"}
for mesh in sys.argv[1:]:
    axes = {f"parallel.{axis}": int(n) for axis, n in (part.split("=") for part in mesh.split(","))}
    cfg = resolve(replace(Config(), **changes, **axes), 16)
    devices = make_mesh(cfg.parallel)
    batch = traces.place_batch(traces.random_batch(cfg), cfg, devices)
    placed = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    state = jax.tree.map(placed, abstract_state(cfg), state_shardings(cfg, devices))
    text = make_train_step(cfg, devices).lower(state, batch).as_text()
    print(mesh, hashlib.sha256(text.encode()).hexdigest())
"""

MESHES = ("pipeline=2,data=2,sequence=2,tensor=2,num_microbatches=2", "replica=2,data=4,tensor=2")


def lowering(hash_seed: int) -> subprocess.Popen:
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-c", LOWER, *MESHES]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)


@pytest.mark.timeout(240)
def test_two_processes_lower_the_same_step():
    first, second = (process.communicate()[0] for process in [lowering(1), lowering(2)])
    assert first.count("\n") == len(MESHES)
    assert second == first
