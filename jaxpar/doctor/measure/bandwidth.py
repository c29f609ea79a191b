"""How fast the collectives are, over all devices, from messages of a KiB to those of a GiB.

A program makes many calls of one collective. Between two calls, one number of the result is written
into the operand: the next call cannot begin before, and none can be left out. That the compiler has
left none out is counted in its own program. On a GPU this adds a kernel of some two microseconds to
each call, as there is one between any two collectives of a step.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.doctor.measure.timing import Spread, time_calls
from jaxpar.doctor.progress import Tell, no_report
from jaxpar.profiling.hlo.collective_bytes import collective_bytes

#: The only axis of the mesh here.
DEVICES = "devices"

#: Bytes of the smallest message, and how much larger each next one is.
SMALLEST, FACTOR = 1 << 10, 16

#: Bytes of the largest message, unless it is given.
MAX_BYTES, MAX_BYTES_ON_CPU = 1 << 30, 1 << 18

#: Calls in a program, of messages up to so many bytes.
CALLS = ((1 << 16, 50), (1 << 24, 20), (1 << 62, 5))
CALLS_ON_CPU = 5


@dataclass(frozen=True)
class Kind:
    """A collective: the call, its size, and what its bus bandwidth is.

    run       x on each device -> the result there.
    shards    the operand is one n-th of the size: of an all-gather, the size is the result's.
    in_place  the result is the next operand. XLA lets an all-reduce overwrite its operand, and
              would copy one that is needed again.
    bus       bytes over the slowest link, over the size, by the number of devices. By it, all
              collectives can be held against the links' speed.
              Source: nccl-tests, doc/PERFORMANCE.md.
    opcodes   what the compiler calls it, as `profiling/hlo/collective_bytes.py` does.
    """

    run: Callable[[jax.Array], jax.Array]
    bus: Callable[[int], float]
    opcodes: tuple[str, ...]
    shards: bool = False
    in_place: bool = False


def _broadcast(x: jax.Array) -> jax.Array:
    """The first device's x: NCCL's broadcast; on CPUs, where there is none, a sum with zeros."""
    if jax.default_backend() == "gpu":
        return lax.pbroadcast(x, (DEVICES,), 0)  # a name alone is taken letter by letter
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
    """One collective at one size.

    size     bytes, as nccl-tests counts them.
    call     seconds of one call.
    """

    kind: str
    size: int
    devices: int
    call: Spread

    @property
    def algorithm(self) -> float:
        """Bytes/s of the size."""
        return self.size / self.call.median

    @property
    def bus(self) -> float:
        """Bytes/s over the slowest link."""
        return self.algorithm * KINDS[self.kind].bus(self.devices)


class LeftOut(Exception):
    """The compiler has not kept every call, so that a time would mean nothing."""


def one_axis(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of one axis, in the order of the devices."""
    return Mesh(np.asarray(devices), (DEVICES,), axis_types=(AxisType.Auto,))


def sizes(largest: int) -> list[int]:
    """From the smallest up, the largest among them."""
    found = [SMALLEST]
    while found[-1] * FACTOR <= largest:
        found.append(found[-1] * FACTOR)
    return found if found[-1] == largest else [*found, largest]


def calls_for(size: int) -> int:
    """Calls in a program."""
    if jax.default_backend() != "gpu":
        return CALLS_ON_CPU
    return next(calls for most, calls in CALLS if size <= most)


def compile_repeated(
    mesh: Mesh, kind: Kind, elements: int, calls: int
) -> Callable[[jax.Array], jax.Array]:
    """A compiled program of so many calls, one after the other.

    Args:     elements: of the operand of each device.
    Returns:  [devices * elements] float32 -> the same; the argument is used up.
    Raises:   LeftOut unless the compiler has kept them all.
    """
    sharding = NamedSharding(mesh, PartitionSpec(DEVICES))
    x = jax.ShapeDtypeStruct((mesh.size * elements,), jnp.float32, sharding=sharding)
    program = trace_repeated(mesh, kind, x, calls).lower().compile()
    require_calls(program, kind.opcodes, calls)
    return program


def trace_repeated(mesh: Mesh, kind: Kind, x: jax.ShapeDtypeStruct, calls: int):
    """The same, not compiled yet."""

    def call(x: jax.Array) -> jax.Array:
        result = kind.run(x)
        missing = tuple({DEVICES} - set(jax.typeof(result).manual_axis_type.varying))
        result = lax.pcast(result, missing, to="varying") if missing else result
        if kind.in_place:
            own = lax.axis_index(DEVICES).astype(x.dtype)  # or the next sum would be of equal ones
            return lax.dynamic_update_slice(result, own[None], (0,))
        return lax.dynamic_update_slice(x, result[-1:], (0,))

    # Written out, since a loop would add a kernel to each call, which counts.
    local = lambda x: functools.reduce(lambda x, _: call(x), range(calls), x)  # noqa: E731
    spec = PartitionSpec(DEVICES)
    program = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(program, donate_argnums=0).trace(x)


def require_calls(program: Callable, opcodes: Sequence[str], calls: int) -> None:
    """Raises:   LeftOut unless the compiled program makes every call."""
    sent = collective_bytes(program.as_text())  # type: ignore[attr-defined]
    made = sum(row["count"] for kind, row in sent.kinds.items() if kind in opcodes)
    if made != calls:
        raise LeftOut(f"{' or '.join(opcodes)}: {made} calls in the program, and not {calls}")


def numbers(mesh: Mesh, elements: int) -> jax.Array:
    """[devices * elements] float32, sharded: between 0 and 1, and no two devices alike."""

    def local() -> jax.Array:
        places = jnp.arange(elements, dtype=jnp.int32) + lax.axis_index(DEVICES)
        return (places % 1021).astype(jnp.float32) / 1021

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=PartitionSpec(DEVICES)))()


def measure(
    mesh: Mesh, largest: int, repeats: int, patience: float, tell: Tell = no_report
) -> Iterator[BandwidthRow]:
    """Every collective at every size, one by one.

    Args:     mesh: of one axis. largest: bytes. repeats, patience: as in `time_calls`. tell: gets
              each piece of work.
    Raises:   LeftOut.
    """
    n = mesh.size
    for kind, about in KINDS.items():
        for size in sizes(largest):
            tell(f"{kind} of {size:,} bytes")
            whole = max(size // 4 // n, 1) * n
            elements, calls = whole // n if about.shards else whole, calls_for(size)
            program = compile_repeated(mesh, about, elements, calls)
            timed = time_calls(program, numbers(mesh, elements), calls, repeats, patience)
            yield BandwidthRow(kind, 4 * whole, n, timed.whole)
