"""The device mesh. There is always one; on a single device, all axes have size 1."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.config import ParallelConfig
from jaxpar.sharding.axes import AXES


def axis_sizes(parallel: ParallelConfig) -> tuple[int, ...]:
    """Return the sizes of the mesh axes in the order of `axes.AXES`; `data` must be filled in."""
    return tuple(getattr(parallel, axis) for axis in AXES)


def make_mesh(parallel: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make the device mesh of a resolved config.

    Devices are taken in the order of their ids, in which XLA keeps the devices of a host, and
    hosts that are close to one another, together: the innermost axes have the fastest links.
    `jax.make_mesh` would refuse the devices of several hosts: each host counts as a slice.

    Args:     devices: use these, in this order, instead of the first of all devices.
    Raises:   ValueError if the axes need more devices, or another number than is given.
    """
    sizes = axis_sizes(parallel)
    types = (AxisType.Auto,) * len(AXES)
    if devices is None:
        devices = sorted(jax.devices(), key=lambda device: device.id)[: math.prod(sizes)]
    return Mesh(np.asarray(devices).reshape(sizes), AXES, axis_types=types)


def shardings(mesh: Mesh, partition_specs):
    """Return the tree of NamedShardings for a tree of PartitionSpecs."""
    is_leaf = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs, is_leaf=is_leaf)


def describe(mesh: Mesh) -> str:
    """Return the axes larger than 1, as "data=4 tensor=2", or "1 device" if there are none."""
    named = [f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1]
    return " ".join(named) or "1 device"
