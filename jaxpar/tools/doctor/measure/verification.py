"""Verifies the results of collectives over every axis of a mesh and over all axes.

Every number sent encodes its sender and its position in the message, in integers that bfloat16
represents exactly. A misdirected message can therefore be identified. The collectives are those of
`jaxpar/parallel`, inside `shard_map`, as a training step uses them.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.config import ConfigError, ParallelConfig
from jaxpar.config.numerals import only_digits
from jaxpar.parallel import collectives
from jaxpar.parallel.collectives import varying
from jaxpar.parallel.tensor import permutes
from jaxpar.sharding.axes import AXES, DATA, EXPERT, PIPELINE, REPLICA, SEQUENCE, TENSOR
from jaxpar.tools.doctor.progress import Tell, no_report

# ----------------------------------------------------------------- The mesh whose axes are verified


#: Mesh axes in the order in which devices are assigned to them, if no mesh is given.
SHARED_OUT = (TENSOR, SEQUENCE, DATA, PIPELINE, REPLICA, EXPERT)


def read_mesh(text: str) -> dict[str, int]:
    """ "data=2,tensor=4" -> {"data": 2, "tensor": 4}."""
    found: dict[str, int] = {}
    for pair in text.split(",") if text else []:
        axis, _, size = (part.strip() for part in pair.partition("="))
        if axis not in AXES or not only_digits(size) or int(size) < 1:
            rule = f"must be AXIS=SIZE, where AXIS is one of {', '.join(AXES)} and SIZE is above 0"
            raise ConfigError("--mesh", pair, rule, "use --mesh data=2,tensor=4")
        if axis in found:
            raise ConfigError("--mesh", text, f"names {axis} twice", "give each axis once")
        found[axis] = int(size)
    return found


def default_mesh(devices: int) -> dict[str, int]:
    """Assign the prime factors of `devices` to the axes: 8 -> tensor=2, sequence=2, data=2."""
    sizes = dict.fromkeys(AXES, 1)
    for i, factor in enumerate(prime_factors(devices)):
        sizes[SHARED_OUT[i % len(SHARED_OUT)]] *= factor
    return sizes


def prime_factors(n: int) -> list[int]:
    """Return the prime factors in ascending order."""
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found


def mesh_for(asked: dict[str, int], devices: int) -> ParallelConfig:
    """Return the mesh to verify.

    Raises:   ConfigError when its axes do not multiply to the number of devices.
    """
    sizes: dict[str, Any] = dict.fromkeys(AXES, 1) | asked if asked else default_mesh(devices)
    if math.prod(sizes.values()) != devices:
        said = ",".join(f"{axis}={size}" for axis, size in asked.items())
        rule = f"takes {math.prod(sizes.values())} devices, but there are {devices}"
        default = {a: s for a, s in default_mesh(devices).items() if s > 1} or {DATA: 1}
        fix = f"use --mesh {','.join(f'{a}={s}' for a, s in default.items())}"
        raise ConfigError("--mesh", said, rule, fix)
    return dataclasses.replace(ParallelConfig(), **sizes)


#: Dtypes of the messages.
DTYPES = ("float32", "bfloat16")

#: Elements of a shard; each device sends one shard to every device of its group. NCCL uses
#: different protocols for small and large messages.
SMALL, LARGE, LARGE_ON_CPU = 256, 1 << 16, 1 << 12

type Axes = tuple[str, ...]


@dataclass(frozen=True)
class Collective:
    """A collective to verify.

    run        (x [pieces, elements] on each device, axes) -> the result on that device.
    expected   (x of all members of the group, in order; position in the group) -> the expected
               result, in numpy.
    sums       it computes sums: x is then chosen so that no sum is rounded.
    one_axis   it accepts only a single axis.
    """

    run: Callable[[jax.Array, Axes], jax.Array]
    expected: Callable[[Sequence[np.ndarray], int], np.ndarray]
    sums: bool = False
    one_axis: bool = False


def _broadcast(x: jax.Array, axes: Axes) -> jax.Array:
    """Return the last member's x, as the pipeline broadcasts the loss."""
    last = lax.axis_index(axes) == lax.axis_size(axes) - 1
    return collectives.psum(jnp.where(last, x, 0), axes)


def _shift(x: jax.Array, axes: Axes) -> jax.Array:
    """Send x to the next device in the ring; over several axes, the ring of all of them."""
    if len(axes) == 1:
        return collectives.shift(x, axes[0], 1)
    n = lax.axis_size(axes)
    return lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])


def _own_piece(members: Sequence[np.ndarray], place: int) -> np.ndarray:
    return np.sum(members, axis=0)[place : place + 1]


#: Every collective that the model and the step use.
COLLECTIVES: dict[str, Collective] = {
    "psum": Collective(collectives.psum, lambda m, _: np.sum(m, axis=0), sums=True),
    "pmax": Collective(collectives.pmax, lambda m, _: np.max(m, axis=0)),
    "all_gather": Collective(
        lambda x, axes: collectives.all_gather(x, axes, 0), lambda m, _: np.concatenate(m)
    ),
    "psum_scatter": Collective(
        lambda x, axes: collectives.psum_scatter(x, axes, 0), _own_piece, sums=True
    ),
    "all_to_all": Collective(
        lambda x, axes: collectives.all_to_all(x, axes, 0, 0),
        lambda m, place: np.stack([x[place] for x in m]),
    ),
    "ppermute": Collective(_shift, lambda m, place: m[place - 1]),
    "broadcast": Collective(_broadcast, lambda m, _: m[-1]),
    "direct.gather": Collective(
        lambda x, axes: permutes.permute_all_gather(x, axes[0], 0),
        lambda m, _: np.concatenate(m),
        one_axis=True,
    ),
    "direct.scatter": Collective(
        lambda x, axes: permutes.permute_reduce_scatter(x, axes[0], 0),
        _own_piece,
        sums=True,
        one_axis=True,
    ),
}


@dataclass(frozen=True)
class Wrong:
    """A wrong result."""

    collective: str
    axes: Axes
    dtype: str
    elements: int
    device: int
    said: str

    def __str__(self) -> str:
        where = f"{self.collective} over {' and '.join(self.axes)}, {self.dtype}"
        return f"{where}, {self.elements} elements: device {self.device} {self.said}"


@dataclass(frozen=True)
class Verified:
    """The collectives run in one program, and the wrong results in this process."""

    axes: Axes
    dtype: str
    elements: int
    collectives: list[str]
    wrong: list[Wrong]


def axes_to_verify(mesh: Mesh) -> list[Axes]:
    """Return each axis larger than 1, then all of them together if there are several."""
    large = tuple(axis for axis in AXES if mesh.shape[axis] > 1)
    return [(axis,) for axis in large] + ([large] if len(large) > 1 else [])


def message(sender: int, pieces: int, elements: int) -> np.ndarray:
    """Return [pieces, elements] float32 that encode sender, receiver and position below 256."""
    piece, place = np.indices((pieces, elements))
    digits = [np.full_like(piece, sender % 256), np.full_like(piece, sender // 256)]
    digits += [piece % 256, place // 4 % 256]
    return np.choose(place % 4, digits).astype(np.float32)


def addends(sender: int, place: int, members: int, pieces: int, elements: int) -> np.ndarray:
    """Return [pieces, elements] float32 whose sums over a group are exact in bfloat16.

    In half of the numbers, only one member has a nonzero value, which identifies it: a member that
    is missing or counted twice is detected. In the other half all members, up to 256, have 1: the
    sum counts them. Each piece starts at a different offset, so that pieces cannot be confused.
    """
    at = np.add.outer(np.arange(pieces), np.arange(elements)) % (2 * members)
    named = np.where(at == place, sender % 255 + 1, 0)
    return np.where(at < members, named, place < 256).astype(np.float32)


def groups(mesh: Mesh, axes: Axes) -> dict[int, tuple[list[int], int]]:
    """Map each device's index in the mesh to the indices of its group and its position there."""
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    where = [AXES.index(axis) for axis in axes]
    first = np.moveaxis(numbers, where, range(len(where)))
    rows = first.reshape(math.prod(mesh.shape[a] for a in axes), -1).T
    return {int(n): (list(map(int, row)), place) for row in rows for place, n in enumerate(row)}


def verify(
    mesh: Mesh,
    elements: Iterable[int],
    collectives: Mapping[str, Collective] = COLLECTIVES,
    tell: Tell = no_report,
) -> Iterator[Verified]:
    """Run every collective and compare this process's results with the expected ones.

    Args:     elements: sizes of a shard. collectives: by name. tell: called with each step.
    Communication: every collective over each axis and over all axes, for each dtype and size.
    """
    for axes, size in itertools.product(axes_to_verify(mesh), elements):
        for dtype in DTYPES:
            chosen = {n: c for n, c in collectives.items() if len(axes) == 1 or not c.one_axis}
            tell(f"{' and '.join(axes)}, {dtype}, shards of {size:,} elements")
            wrong = _verify_once(mesh, axes, dtype, size, chosen)
            yield Verified(axes, dtype, size, list(chosen), wrong)


def _verify_once(
    mesh: Mesh, axes: Axes, dtype: str, size: int, chosen: Mapping[str, Collective]
) -> list[Wrong]:
    found = groups(mesh, axes)
    n = len(found[0][0])
    sent = [message(i, n, size) for i in range(mesh.size)]
    added = [addends(i, found[i][1], n, n, size) for i in range(mesh.size)]

    def local(moved, summed):
        x = {False: moved[0], True: summed[0]}
        return {name: varying(c.run(x[c.sums], axes))[None] for name, c in chosen.items()}

    spec = PartitionSpec(AXES)
    arrays = (_place(mesh, spec, sent, dtype), _place(mesh, spec, added, dtype))
    program = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=True)
    )
    results, number = program(*arrays), {d: i for i, d in enumerate(mesh.devices.flat)}
    wrong = []
    for name, collective in chosen.items():
        inputs = added if collective.sums else sent
        for shard in results[name].addressable_shards:
            own = number[shard.device]
            members, place = found[own]
            expected = collective.expected([inputs[i] for i in members], place)
            said = compare(np.asarray(shard.data[0], np.float32), expected, members)
            if said:
                wrong.append(Wrong(name, axes, dtype, size, own, said))
    return wrong


def _place(mesh: Mesh, spec: PartitionSpec, rows: Sequence[np.ndarray], dtype: Any) -> jax.Array:
    """Each device's row of an array [devices, pieces, elements]."""
    cast = [row.astype(jnp.dtype(dtype)) for row in rows]
    shape = (len(rows), *rows[0].shape)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(shape, sharding, lambda at: np.stack(cast[at[0]]))  # type: ignore[index]


def compare(got: np.ndarray, expected: np.ndarray, members: Sequence[int]) -> str:
    """Describe what is wrong with a result; empty if it is correct."""
    if got.shape != expected.shape:
        return f"has shape {got.shape} instead of {expected.shape}"
    bad = np.argwhere(got != expected)
    if not len(bad):
        return ""
    piece, element = map(int, bad[0])
    said = f"has {len(bad):,} of {got.size:,} values wrong, the first in shard {piece}, at "
    said += f"{element}: {got[piece, element]:g} instead of {expected[piece, element]:g}"
    for sender in members:
        sent = message(sender, len(members), got.shape[1])
        for place in np.flatnonzero((sent == got[piece]).all(axis=1)):
            return f"{said}. Device {sender} sent this to position {place}"
    return said
