"""The one table between logical axes and the axes of the mesh, and the mesh that has them."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpar.components.weight import RULES
from jaxpar.config import ParallelConfig
from jaxpar.sharding import axes
from jaxpar.sharding import mesh as mesh_module
from jaxpar.sharding.grid import grid
from jaxpar.sharding.mesh import axis_sizes, describe, make_mesh, shardings


def test_every_rule_names_axes_of_the_mesh_and_no_axis_twice():
    for name, over in RULES.items():
        assert set(over) <= set(axes.AXES), name
        assert len(set(over)) == len(over), name
    assert set(axes.TOKEN_AXES) == {*axes.BATCH_AXES, axes.SEQUENCE}
    assert set(axes.FSDP_AXES) < set(axes.TOKEN_AXES), "gradients are summed where batches differ"


def test_a_partition_spec_has_an_entry_for_each_dimension():
    spec = axes.partition_spec(("layer", "embed", "kv_heads", "head_dim"))
    assert spec == PartitionSpec("pipeline", axes.FSDP_AXES, "tensor", None)
    assert axes.axes_of(spec) == {"pipeline", "data", "expert", "sequence", "tensor"}
    assert axes.axes_of(PartitionSpec()) == frozenset()
    with pytest.raises(KeyError, match="width"):
        axes.partition_spec(("width",))


def test_a_mesh_has_every_axis_in_order_with_the_innermost_next_to_each_other(devices):
    parallel = ParallelConfig(pipeline=2, data=2, tensor=2)
    mesh = make_mesh(parallel, devices[:8])
    assert mesh.axis_names == axes.AXES
    assert mesh.devices.shape == axis_sizes(parallel) == (2, 1, 2, 1, 1, 2)
    assert mesh.devices[1, 0, 0, 0, 0].tolist() == devices[4:6]
    assert describe(mesh) == "pipeline=2 data=2 tensor=2"
    assert describe(make_mesh(ParallelConfig(data=1), devices[:1])) == "1 device"
    with pytest.raises(ValueError, match="reshape"):
        make_mesh(parallel, devices[:7])


def test_shardings_cut_an_array_as_its_spec_says(devices):
    mesh = make_mesh(ParallelConfig(data=2, tensor=4), devices[:8])
    specs = {"a": axes.partition_spec(("embed", "mlp")), "b": PartitionSpec()}
    whole = np.arange(8 * 12).reshape(8, 12)
    placed = jax.device_put({"a": whole, "b": whole}, shardings(mesh, specs))
    for device, shard in zip(mesh.devices.ravel(), placed["a"].addressable_shards, strict=True):
        row, column = divmod(mesh.devices.ravel().tolist().index(device), 4)
        assert shard.device == device
        np.testing.assert_array_equal(
            shard.data, whole[4 * row : 4 * row + 4, 3 * column : 3 * column + 3]
        )
    assert placed["b"].is_fully_replicated


@pytest.mark.parametrize("chunk", [(1, 1), (2, 3), (5, 7), (9, 2)])
def test_boxes_of_a_grid_cover_each_element_once(chunk):
    seen = np.zeros((5, 7), int)
    for box in grid(seen.shape, chunk):
        seen[box] += 1
    assert (seen == 1).all()


def test_the_devices_of_several_hosts_make_a_mesh_in_the_order_of_their_ids(monkeypatch):
    """To JAX each host is a slice, which `jax.make_mesh` refuses; XLA numbers them by nearness."""

    class Device:
        def __init__(self, number: int):
            self.id, self.slice_index, self.device_kind = number, number // 4, "NVIDIA H100"
            self.platform, self.process_index = "gpu", number // 4

    numbers = [4, 5, 6, 7, 0, 1, 2, 3]
    monkeypatch.setattr(jax, "devices", lambda: list(map(Device, numbers)))
    monkeypatch.setattr(mesh_module, "Mesh", lambda devices, axes, axis_types: devices)
    made: Any = make_mesh(ParallelConfig(data=2, tensor=4))
    assert [device.id for device in made.flat] == list(range(8))
