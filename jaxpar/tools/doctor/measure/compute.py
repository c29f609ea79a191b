"""Measures how fast each device multiplies and copies.

All devices work at the same time, each timed separately: in training, too, a host's GPUs share
cooling and power.
"""

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.kernels.float8.rounding import FORWARD
from jaxpar.runtime.gpus import nvml
from jaxpar.runtime.gpus.nvml import GpuLoad
from jaxpar.runtime.timing import Spread, time_batches, time_work, when_ready
from jaxpar.tools.doctor.measure.bandwidth import DEVICES, one_axis
from jaxpar.tools.doctor.progress import Tell, no_report

_SPEC = PartitionSpec(DEVICES)

#: (rows, in, out) of the matmuls: a square one, and those of an 8B model's MLP at 16,384 tokens.
SHAPES = ((8192, 8192, 8192), (16384, 4096, 14336), (16384, 14336, 4096))
SHAPES_ON_CPU = ((512, 512, 512),)

#: Seconds of consecutive matmuls, in which the GPU settles to its sustained clocks.
LASTING, LASTING_ON_CPU = 2.0, 0.2

#: Matmuls in a program.
CALLS, CALLS_ON_CPU = 40, 4

#: Bytes copied within a device, and between host and device.
COPY, COPY_ON_CPU = 1 << 30, 8 << 20
TRANSFER = 256 << 20

#: Lowest compute capability whose tensor cores multiply 8-bit floats.
FLOAT8_SINCE = (8, 9)


@dataclass(frozen=True)
class Rate:
    """A rate measured on the local devices.

    what     "matmul bfloat16", "matmul float8", "copy", "host to device", "device to host".
    detail   the shape, or the kind of host memory.
    unit     "FLOP/s" or "bytes/s".
    devices  the rate of each device, in the order of `jax.local_devices()`.
    """

    what: str
    detail: str
    unit: str
    devices: list[float]

    @property
    def median(self) -> float:
        """Median over the devices."""
        return statistics.median(self.devices)


def measure(repeats: int, tell: Tell = no_report) -> Iterator[Rate]:
    """Measure every rate.

    Args:     tell: called with the name of each measurement.
    """
    mesh, on_gpu = one_axis(jax.local_devices()), jax.default_backend() == "gpu"
    kinds = ["bfloat16" if on_gpu else "float32"]
    kinds += ["float8"] if has_float8(jax.local_devices()[0]) else []
    for dtype, shape in itertools.product(kinds, SHAPES if on_gpu else SHAPES_ON_CPU):
        tell(f"matmul {dtype}, {shape}")
        yield _matmul(mesh, shape, dtype, repeats)
    tell("copies")
    yield _copy(mesh, COPY if on_gpu else COPY_ON_CPU, repeats)
    if on_gpu:
        yield from _transfers(repeats)


def has_float8(device: jax.Device) -> bool:
    """Return whether a GPU multiplies 8-bit floats."""
    capability = str(getattr(device, "compute_capability", "")).split(".")
    return len(capability) == 2 and tuple(map(int, capability)) >= FLOAT8_SINCE


def _matmul(mesh: Mesh, shape: tuple[int, int, int], dtype: str, repeats: int) -> Rate:
    calls = CALLS if jax.default_backend() == "gpu" else CALLS_ON_CPU
    program, arguments = matmuls(mesh, dtype, calls), operands(mesh, shape, dtype)
    seconds = _each_device(lambda: program(*arguments), repeats)
    flops = 2.0 * shape[0] * shape[1] * shape[2] * calls
    rates = [flops / spread.median for spread in seconds]
    return Rate(f"matmul {dtype}", " x ".join(map(str, shape)), "FLOP/s", rates)


def dtypes(name: str) -> tuple[Any, Any]:
    """Return the dtypes of operands and products: float8 operands give bfloat16 products."""
    return (FORWARD, jnp.bfloat16) if name == "float8" else (jnp.dtype(name), jnp.dtype(name))


def matmuls(mesh: Mesh, dtype: str, calls: int) -> Callable[..., jax.Array]:
    """Return a program of consecutive matmuls, (x, w) -> x: x [rows, in] by w [out, in].

    One element of each product is written into x, so that the next matmul depends on it.
    """
    narrow, wide = dtypes(dtype)

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        # Tensor cores need the contracted dim of 8-bit operands contiguous: it is last in both.
        y = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=wide)
        y = lax.optimization_barrier(y)  # otherwise XLA computes only that element
        return lax.dynamic_update_slice(x, y[-1:, -1:].astype(narrow), (0, 0))

    def local(x, w):
        return lax.fori_loop(0, calls, lambda _, x: multiply(x, w), x)

    return _on_each(mesh, local, 2)


def operands(mesh: Mesh, shape: tuple[int, int, int], dtype: str) -> tuple[jax.Array, ...]:
    """Return x and w for `matmuls` on each device: random, since zeros draw less power."""
    rows, inner, outer = shape

    def fill(key):
        def normal(i: int, shape: tuple[int, int], size: float) -> jax.Array:
            drawn = jax.random.normal(jax.random.fold_in(key[0], i), shape) * size
            return drawn.astype(dtypes(dtype)[0])

        return normal(0, (rows, inner), 1.0), normal(1, (outer, inner), inner**-0.5)

    keys = jax.random.split(jax.random.key(0), mesh.size)
    keys = jax.device_put(keys, NamedSharding(mesh, _SPEC))
    return jax.block_until_ready(_on_each(mesh, fill, 1)(keys))


def _on_each(mesh: Mesh, function: Callable[..., Any], arguments: int) -> Callable[..., Any]:
    """Compile a function of each device's own shards."""
    specs = (_SPEC,) * arguments
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=_SPEC))


def _each_device(program: Callable[[], jax.Array], repeats: int) -> list[Spread]:
    """Time a program on each local device, in order."""
    jax.block_until_ready(program())
    found = time_batches(program, repeats).devices
    return [found[device.id] for device in jax.local_devices()]


@dataclass(frozen=True)
class Lasting:
    """The result of `multiply_sustained`.

    rate    of the square matmul. load   of this host's GPUs meanwhile.
    """

    rate: Rate
    load: list[GpuLoad]


def multiply_sustained(first: Rate) -> Lasting:
    """Multiply for `LASTING` seconds and query the GPUs under load.

    Args:     first: the rate of the first shape, which determines the number of launches.
    """
    on_gpu = jax.default_backend() == "gpu"
    shape = (SHAPES if on_gpu else SHAPES_ON_CPU)[0]
    calls = CALLS if on_gpu else CALLS_ON_CPU
    mesh, dtype = one_axis(jax.local_devices()), first.what.split()[1]
    program, (x, w) = matmuls(mesh, dtype, calls), operands(mesh, shape, dtype)
    flops = 2.0 * shape[0] * shape[1] * shape[2] * calls
    launches = max(round((LASTING if on_gpu else LASTING_ON_CPU) * first.median / flops), 1)
    jax.block_until_ready(program(x, w))
    load: list[GpuLoad] = []
    looking = threading.Thread(target=lambda: load.extend(_look()))
    began = time.perf_counter()
    for i in range(launches):
        x = program(x, w)
        if i == launches // 4:
            jax.block_until_ready(x)
            looking.start()
    ready = when_ready(x)
    looking.join()
    rates = [flops * launches / (ready[d.id] - began) for d in jax.local_devices()]
    return Lasting(Rate(first.what, f"{first.detail}, sustained", "FLOP/s", rates), load)


def _look() -> list[GpuLoad]:
    try:
        return nvml.loads()
    except nvml.Unavailable:
        return []


def _copy(mesh: Mesh, size: int, repeats: int) -> Rate:
    """Measure copies within a device: every element is read, changed and written."""
    sharding = NamedSharding(mesh, _SPEC)
    x = jax.jit(lambda: jnp.ones((mesh.size * size // 4,), jnp.float32), out_shardings=sharding)()
    add = jax.jit(lambda x: x + 1.0, donate_argnums=0, out_shardings=sharding)
    calls, held = 10, [x]

    def program() -> jax.Array:
        for _ in range(calls):
            held[0] = add(held[0])
        return held[0]

    seconds = _each_device(program, repeats)
    rates = [2.0 * size * calls / spread.median for spread in seconds]
    return Rate("copy", f"{size >> 20} MiB", "bytes/s", rates)


def _transfers(repeats: int) -> Iterator[Rate]:
    """Measure transfers between host and device, one device at a time: numpy and pinned memory."""
    host, devices = np.ones(TRANSFER // 4, np.float32), jax.local_devices()
    ways = {
        "numpy": [(_put(host, device, repeats), _get(device, repeats)) for device in devices],
        "pinned": [_pinned(device, repeats) for device in devices],
    }
    for memory, seconds in ways.items():
        for back, what in enumerate(("host to device", "device to host")):
            rates = [TRANSFER / each[back] for each in seconds]
            yield Rate(what, f"{TRANSFER >> 20} MiB, {memory}", "bytes/s", rates)


def _put(host: np.ndarray, device: jax.Device, repeats: int) -> float:
    return time_work(lambda: jax.device_put(host, device).block_until_ready(), repeats).median


def _get(device: jax.Device, repeats: int) -> float:
    # An array remembers its copy on the host, so each is read once.
    zeros = jax.device_put(np.zeros(TRANSFER // 4, np.float32), device)
    arrays = iter([jax.block_until_ready(zeros + i) for i in range(repeats + 1)])
    return time_work(lambda: np.asarray(next(arrays)), repeats).median


def _pinned(device: jax.Device, repeats: int) -> tuple[float, float]:
    """Return the seconds to the device and back."""
    here = jax.sharding.SingleDeviceSharding(device)
    there = here.with_memory_kind("pinned_host")
    x = jax.device_put(jnp.ones(TRANSFER // 4, jnp.float32), here)
    y = jax.block_until_ready(jax.device_put(x, there))
    move = lambda array, to: jax.block_until_ready(jax.device_put(array, to))  # noqa: E731
    to_device = time_work(lambda: move(y, here), repeats)
    return to_device.median, time_work(lambda: move(x, there), repeats).median


def by_place(rates: Sequence[Sequence[float]]) -> list[float]:
    """Concatenate the rates of all processes' devices."""
    return [rate for of_process in rates for rate in of_process]
