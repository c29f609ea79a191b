"""Checkpoints of pipelines with unequal stages: the logical arrays of every other mesh."""

import jax
import numpy as np
import pytest

from jaxpar import config
from jaxpar.checkpoint import saved, stored_arrays
from jaxpar.checkpoint.loading import restore
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.config import Config
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import state
from tests.checkpoint.test_checkpoint import (
    VIRTUAL,
    assert_same_bits,
    logical,
    save,
    write_dataset,
)
from tests.slow import slow
from tests.tiny import STATE

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

DATA_4 = {"parallel.data": 4}

#: Seven layers over four stages, the last of which has an empty slot.
UNEQUAL = {"parallel.pipeline": 4, "parallel.num_microbatches": 2, "parallel.data": 1}

OFFLOAD = {"optimizer.offload": True}


@pytest.fixture
def setup(tmp_path, devices):
    """(fields of the config) -> (the resolved config of a run in a folder, its mesh)."""
    data = write_dataset(tmp_path / "data")
    base = config.replace(Config(), **STATE | {"model.num_layers": 7, "data.path": data})

    def make(folder: str, **values):
        cfg = config.replace(base, **values, **{"run.dir": str(tmp_path / folder)})
        n = cfg.parallel.pipeline * cfg.parallel.data
        return resolve(cfg, n), make_mesh(cfg.parallel, devices[:n])

    return make


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (DATA_4, UNEQUAL),
        slow(DATA_4, UNEQUAL | OFFLOAD),
        slow(UNEQUAL | {"parallel.layers_per_stage": (1, 3, 2, 1)}, UNEQUAL),
        slow(UNEQUAL, UNEQUAL | VIRTUAL),
    ],
)
def test_another_mesh_reads_the_same_arrays_and_back(setup, one, other):
    first, first_mesh = setup("first", **one)
    expected = logical(save(first, first_mesh, 5), first)
    second, second_mesh = setup("first", **other)
    restored = restore(second, second_mesh)
    assert_same_bits(logical(restored, second), expected)

    moved, _ = setup("moved", **other)
    with Checkpointer(moved) as checkpointer:
        checkpointer.save(restored, 5, tokens_seen=0)
    back, _ = setup("moved", **one)
    assert_same_bits(logical(restore(back, first_mesh), back), expected)


@pytest.mark.parametrize("more", [{}, slow(OFFLOAD)], ids=["", "offload"])
def test_empty_slots_of_a_stage_are_not_saved(setup, more):
    cfg, mesh = setup("run", **UNEQUAL | more)
    running = save(cfg, mesh, 2)
    folder = saved.checkpoint_folder(cfg.run.dir) / "2"
    layers = [name for name in stored_arrays.array_names(folder) if "layers/" in name]
    assert {stored_arrays.open_array(folder, name).shape[0] for name in layers} == {7}
    restored = restore(cfg, mesh)
    assert_same_bits(restored, running)
    assert jax.tree.map(lambda a: a.sharding, restored) == state.state_shardings(cfg, mesh)
    wq = np.asarray(restored.params["layers"]["wq"])
    assert len(wq) == 8 and not wq[7].any() and all(layer.any() for layer in wq[:7])


def test_a_saved_state_is_in_host_memory(setup):
    """All of its layers, so that a device needs memory for one array at a time."""
    cfg, mesh = setup("run", **UNEQUAL)
    copy = state.snapshot(state.init_state(cfg, mesh), cfg)
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(copy.params["layers"])}
    assert kinds == {"pinned_host"}
