"""Measures the bandwidth of collectives over all devices, for messages from 1 KiB to 1 GiB.

A program makes many calls of one collective. Between two calls, one element of the result is
written into the operand. The next call therefore depends on the previous one, and the compiler can
remove none; the compiled program is checked for that. On a GPU this adds a kernel of about two
microseconds to each call. A training step also runs kernels between its collectives. Small messages
take as long as the host needs to launch a call (docs/experiments.md).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.monitoring.hlo import collective_bytes
from jaxpar.runtime.timing import Spread, time_calls
from jaxpar.tools.doctor.progress import Tell, no_report

#: The axis of the collectives, and that of groups of devices which call them at the same time.
DEVICES, GROUPS = "devices", "groups"

#: Bytes of the smallest message, and the ratio of consecutive sizes.
SMALLEST, FACTOR = 1 << 10, 16

#: Bytes of the largest message by default.
MAX_BYTES, MAX_BYTES_ON_CPU = 1 << 30, 1 << 18

#: (largest message in bytes, calls in a program).
CALLS = ((1 << 16, 50), (1 << 24, 20), (1 << 62, 5))
CALLS_ON_CPU = 5


@dataclass(frozen=True)
class Kind:
    """A collective: the call, its size and the factor of its bus bandwidth.

    run       the operand on each device -> the result on that device.
    shards    the operand has 1/n of the size. An all-gather's size is that of its result.
    in_place  the result becomes the next operand. XLA lets an all-reduce overwrite its operand,
              and would otherwise copy it.
    bus       number of devices -> bytes over the slowest link divided by the size. It makes the
              bandwidth comparable with the speed of the links.
              Source: nccl-tests, doc/PERFORMANCE.md.
    opcodes   the compiler's names, as in `monitoring/hlo/collective_bytes.py`.
    """

    run: Callable[[jax.Array], jax.Array]
    bus: Callable[[int], float]
    opcodes: tuple[str, ...]
    shards: bool = False
    in_place: bool = False


def _broadcast(x: jax.Array) -> jax.Array:
    """Return the first device's x: NCCL's broadcast; on CPUs, which have none, a sum with zeros."""
    if jax.default_backend() == "gpu":
        return lax.pbroadcast(x, (DEVICES,), 0)  # a bare string is read letter by letter
    return lax.psum(jnp.where(lax.axis_index(DEVICES) == 0, x, 0), DEVICES)


def _round_the_ring(x: jax.Array) -> jax.Array:
    n = lax.axis_size(DEVICES)
    return lax.ppermute(x, DEVICES, [(i, (i + 1) % n) for i in range(n)])


def _part(n: int) -> float:
    return (n - 1) / n


KINDS: dict[str, Kind] = {
    "all-reduce": Kind(
        lambda x: lax.psum(x, DEVICES), lambda n: 2 * _part(n), ("all-reduce",), in_place=True
    ),
    "all-gather": Kind(
        lambda x: lax.all_gather(x, DEVICES, tiled=True), _part, ("all-gather",), shards=True
    ),
    "reduce-scatter": Kind(
        lambda x: lax.psum_scatter(x, DEVICES, tiled=True), _part, ("reduce-scatter",)
    ),
    "broadcast": Kind(_broadcast, lambda n: 1.0, ("broadcast", "all-reduce")),
    "all-to-all": Kind(
        lambda x: lax.all_to_all(x, DEVICES, 0, 0, tiled=True), _part, ("all-to-all",)
    ),
    "permute": Kind(_round_the_ring, lambda n: 1.0, ("permute",)),
}


@dataclass(frozen=True)
class BandwidthRow:
    """The timing of one collective at one size.

    size     bytes, as defined by nccl-tests.
    call     seconds per call.
    """

    kind: str
    size: int
    devices: int
    call: Spread

    @property
    def algorithm(self) -> float:
        """Algorithm bandwidth in bytes/s: size over time."""
        return self.size / self.call.median

    @property
    def bus(self) -> float:
        """Bus bandwidth in bytes/s: the traffic over the slowest link."""
        return self.algorithm * KINDS[self.kind].bus(self.devices)


class LeftOut(Exception):
    """Raised if the compiler removed calls, so that the timing is meaningless."""


def one_axis(devices: Sequence[jax.Device]) -> Mesh:
    """Return a mesh with one axis, in the order of the devices."""
    return Mesh(np.asarray(devices), (DEVICES,), axis_types=(AxisType.Auto,))


def in_groups(groups: Sequence[Sequence[jax.Device]]) -> Mesh:
    """Return a mesh of groups of equal size, each of which communicates within itself."""
    return Mesh(np.asarray(groups), (GROUPS, DEVICES), axis_types=(AxisType.Auto,) * 2)


def sizes(largest: int) -> list[int]:
    """Return the message sizes in ascending order, including `largest`."""
    found = [SMALLEST]
    while found[-1] * FACTOR <= largest:
        found.append(found[-1] * FACTOR)
    return found if found[-1] == largest else [*found, largest]


def calls_for(size: int) -> int:
    """Return the number of calls in a program."""
    if jax.default_backend() != "gpu":
        return CALLS_ON_CPU
    return next(calls for most, calls in CALLS if size <= most)


def compile_repeated(mesh: Mesh, kind: Kind, elements: int, calls: int) -> jax.stages.Compiled:
    """Compile a program of `calls` dependent calls.

    Args:     elements: size of the operand on each device.
    Returns:  [devices * elements] float32 -> the same; the argument is donated.
    Raises:   LeftOut if the compiler removed calls.
    """
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    x = jax.ShapeDtypeStruct((mesh.size * elements,), jnp.float32, sharding=sharding)
    program = trace_repeated(mesh, kind, x, calls).lower().compile()
    require_calls(program, kind.opcodes, calls)
    return program


def trace_repeated(mesh: Mesh, kind: Kind, x: jax.ShapeDtypeStruct, calls: int):
    """Trace the program of `compile_repeated`."""

    def call(x: jax.Array) -> jax.Array:
        result = kind.run(x)
        varying = jax.typeof(result).manual_axis_type.varying
        missing = tuple(axis for axis in mesh.axis_names if axis not in varying)
        result = lax.pcast(result, missing, to="varying") if missing else result
        if kind.in_place:
            own = lax.axis_index(DEVICES).astype(
                x.dtype
            )  # keeps the operands of the next sum different
            return lax.dynamic_update_slice(result, own[None], (0,))
        return lax.dynamic_update_slice(x, result[-1:], (0,))

    # Unrolled, since a loop would add a kernel to each call.
    local = lambda x: functools.reduce(lambda x, _: call(x), range(calls), x)  # noqa: E731
    spec = PartitionSpec(mesh.axis_names)
    program = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(program, donate_argnums=0).trace(x)


def require_calls(program: jax.stages.Compiled, opcodes: Sequence[str], calls: int) -> None:
    """Check that the compiled program makes every call.

    Raises:   LeftOut if it does not.
    """
    sent = collective_bytes(program.as_text() or "")
    made = sum(row["count"] for kind, row in sent.kinds.items() if kind in opcodes)
    if made != calls:
        raise LeftOut(f"{' or '.join(opcodes)}: {made} calls in the program instead of {calls}")


def numbers(mesh: Mesh, elements: int) -> jax.Array:
    """Return [devices * elements] float32, sharded: in [0, 1), different on each device."""

    def local() -> jax.Array:
        places = jnp.arange(elements, dtype=jnp.int32) + lax.axis_index(mesh.axis_names)
        return (places % 1021).astype(jnp.float32) / 1021

    spec = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=spec))()


def measure(
    mesh: Mesh,
    largest: int,
    repeats: int,
    patience: float,
    tell: Tell = no_report,
    kinds: Sequence[str] = tuple(KINDS),
    at: Sequence[int] = (),
) -> Iterator[BandwidthRow]:
    """Time collectives at several sizes.

    Args:     mesh: from `one_axis` or `in_groups`. largest: bytes of the largest message. repeats,
              patience: as in `time_calls`. tell: called with the name of each measurement. kinds:
              the collectives. at: bytes of the messages; empty: `sizes(largest)`.
    Raises:   LeftOut if the compiler removed calls.
    """
    n = mesh.shape[DEVICES]
    for kind in kinds:
        about = KINDS[kind]
        for size in at or sizes(largest):
            tell(f"{kind} of {size:,} bytes")
            whole = max(size // 4 // n, 1) * n
            elements, calls = whole // n if about.shards else whole, calls_for(size)
            program = compile_repeated(mesh, about, elements, calls)
            timed = time_calls(program, numbers(mesh, elements), calls, repeats, patience)
            yield BandwidthRow(kind, 4 * whole, n, timed.whole)
