"""A copy of a state in host memory, from which a save is written while training continues.

The memory is allocated once, on a thread, before the first save needs it.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jaxpar.runtime.gpus.host_copies import CudaError, PinnedMemory, allocated, copy_to_host
from jaxpar.runtime.host_memory import host_memory
from jaxpar.runtime.processes import peers
from jaxpar.runtime.terminal import warn
from jaxpar.sharding.grid import Box, boxes_of, volume


class HostCopy:
    """Host memory for one copy of a state, kept from save to save. A context manager.

    The copies are arrays on the host's CPU devices, one for each GPU, which share this memory. They
    have the state's shapes and PartitionSpecs.
    """

    def __init__(self, like: Any):
        """Args:     like: the state, or abstract arrays with shardings. Allocates nothing yet."""
        self._like = jax.tree.leaves(like)
        self._hosts = _host_devices(self._like)
        self._memory: dict[tuple[int, Box], PinnedMemory] = {}
        self._go, self._busy, self._ended = threading.Event(), threading.Lock(), False
        self._thread: threading.Thread | None = None
        self._failure: MemoryError | None = None

    @property
    def by_xla(self) -> bool:
        """Whether copies are in memory of XLA instead (`copied_by_xla`)."""
        return self._hosts is None

    def begin(self) -> None:
        """Start to allocate the memory that is missing, on a thread."""
        self._go.set()
        if not self.by_xla:
            self._thread = threading.Thread(target=self._allocate_all, name="host copy")
            self._thread.start()

    def _allocate_all(self) -> None:
        self._failure = None
        try:
            self._check_room()
            for number, x in enumerate(self._like):
                for part in boxes_of(x.shape, x.sharding):
                    self._go.wait()
                    with self._busy:
                        if self._ended:
                            return
                        if (number, part) not in self._memory:
                            self._memory[number, part] = _memory_for(x, part)
        except MemoryError as failure:  # the save itself will report it
            self._failure = failure

    def _check_room(self) -> None:
        """Raises:   MemoryError when the copy cannot fit: the system would end the process."""
        missing = [
            _num_bytes(x, part)
            for number, x in enumerate(self._like)
            for part in boxes_of(x.shape, x.sharding)
            if (number, part) not in self._memory
        ]
        needed, limit = sum(missing), host_memory() // peers.processes_here()
        if needed > limit:
            text = f"a copy of the state needs {needed / 1e9:.1f} GB of host memory for each of "
            raise MemoryError(f"{text}the processes here, which have {limit / 1e9:.1f} GB each")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Allocate nothing meanwhile. Waits for the array for which memory is being allocated."""
        self._go.clear()
        try:
            with self._busy:
                yield
        finally:
            self._go.set()

    def take(self, tree: Any) -> Any:
        """Copy a state. Blocks until done. The copy is valid until the next call.

        If the driver refuses the copy, XLA makes it, now and later, with a warning.

        Raises:   MemoryError; jax.errors.JaxRuntimeError as `copied_by_xla`.
        """
        leaves, structure = jax.tree.flatten(tree)
        if self._hosts is None:
            return copied_by_xla(tree)
        if self._thread is None or self._failure is not None:
            self.begin()
        self._wait()
        if self._failure is not None:
            raise self._failure
        jax.block_until_ready(leaves)
        pairs, copies = [], []
        for number, x in enumerate(leaves):
            shards, views = {shard.device: shard.data for shard in x.addressable_shards}, []
            for part, devices in boxes_of(x.shape, x.sharding).items():
                memory, source = self._memory[number, part].content, shards[devices[0]]
                pairs.append((source, memory))
                view = memory.view(x.dtype).reshape(source.shape)
                views += [(device, view) for device in devices]
            copies.append((x, views))
        try:
            copy_to_host(pairs)
        except CudaError as error:
            warn(f"saves are slower, since {error}: XLA copies the state to the host")
            self._hosts = None
            return copied_by_xla(tree)
        return jax.tree.unflatten(structure, [_on_host(*each, self._hosts) for each in copies])

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> "HostCopy":
        return self

    def __exit__(self, *_: object) -> None:
        """Allocate no more, and free the memory. No copy may be in use."""
        self._ended = True
        self._go.set()
        self._wait()
        thread = threading.Thread(target=self._close_all)
        thread.start()
        thread.join()
        self._memory.clear()

    def _close_all(self) -> None:
        for memory in self._memory.values():
            memory.close()


def copied_in_all(host: HostCopy, tree: Any) -> Any:
    """Call `host.take`, and fail in all processes if it fails in one.

    Otherwise Orbax would wait for the process that failed.

    Raises:   as `HostCopy.take`; OSError if another process failed.
    """
    copied, error = None, None
    try:
        copied = host.take(tree)
    except (MemoryError, jax.errors.JaxRuntimeError) as failure:
        error = failure
    if peers.any_process(error is not None):
        raise error or OSError("another process had no host memory for its shards")
    return copied


def copied_by_xla(tree: Any) -> Any:
    """Copy the arrays to pinned host memory that XLA allocates, with the same sharding.

    For states of which a part is in such memory already.

    Raises:   jax.errors.JaxRuntimeError when the memory cannot be allocated.
    """
    to = jax.tree.map(lambda a: a.sharding.with_memory_kind("pinned_host"), tree)
    return jax.block_until_ready(jax.device_put(tree, to))


def _memory_for(x: Any, part: Box) -> PinnedMemory:
    """Return memory for a part of an array. Raises:   MemoryError."""
    device = min(x.sharding.addressable_devices, key=lambda device: device.id)
    return PinnedMemory(allocated(_num_bytes(x, part)), device)


def _num_bytes(x: Any, part: Box) -> int:
    return volume(part) * x.dtype.itemsize


def _host_devices(leaves: list[Any]) -> dict[jax.Device, jax.Device] | None:
    """Return a CPU device for each device of a state.

    None if the state is not all in device memory, if JAX has too few CPU devices, or if GPUs belong
    to several processes, where this was not tried.
    """
    if any(x.sharding.memory_kind == "pinned_host" for x in leaves):
        return None
    devices = {device for x in leaves for device in x.sharding.device_set}
    order = sorted(devices, key=lambda device: device.id)
    if all(device.platform == "cpu" for device in order):
        return dict(zip(order, order, strict=True))
    try:
        cpus = jax.devices("cpu")
    except RuntimeError:  # JAX_PLATFORMS excludes them
        return None
    if jax.process_count() > 1 or len(cpus) < len(devices):
        return None
    return dict(zip(order, cpus, strict=False))


def _on_host(
    x: jax.Array, views: list[tuple[jax.Device, np.ndarray]], hosts: dict[jax.Device, jax.Device]
) -> jax.Array:
    """Return an array like x on CPU devices, which shares the memory of the views."""
    shards = [jax.device_put(view, hosts[device], may_alias=True) for device, view in views]
    sharding = _host_sharding(x.sharding, hosts)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


def _host_sharding(sharding: Sharding, hosts: dict[jax.Device, jax.Device]) -> Sharding:
    if not isinstance(sharding, NamedSharding):
        (device,) = sharding.device_set
        return SingleDeviceSharding(hosts[device])
    mesh = sharding.mesh
    devices = np.vectorize(hosts.__getitem__, otypes=[object])(mesh.devices)
    return NamedSharding(Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types), sharding.spec)
