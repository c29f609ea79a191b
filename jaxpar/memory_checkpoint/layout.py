"""Which pieces of the state each process writes: every part that its host holds, once a host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.memory_checkpoint.piece_file import ArrayType, PieceIndex, place_pieces
from jaxpar.sharding.fingerprint import named_leaves
from jaxpar.sharding.grid import Box, boxes_of


@dataclass(frozen=True)
class ProcessPieces:
    """The pieces of one process. Parts that too few hosts hold are sent to others."""

    single: PieceIndex
    """Pieces that are sent."""
    shared: PieceIndex
    """Pieces that enough hosts hold as replicas, which are not sent."""
    devices: dict[tuple[int, Box], jax.Device]
    """The device of this process that a piece is copied from, by array and box."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return self.single.num_bytes + self.shared.num_bytes


def pieces_of(
    tree: Any,
    hosts: Sequence[int],
    process: int,
    copies: int,
    process_of: Callable[[jax.Device], int] = lambda device: device.process_index,
) -> ProcessPieces:
    """Return the pieces that a process writes.

    The lowest process of a host that holds a part writes it for the host.

    Args:     tree: the logical state, or abstract arrays with shardings. hosts: the host of each
              process. copies: other hosts that are to hold each part. process_of: returns the
              process of a device.
    """
    arrays, source = list[ArrayType](), dict[tuple[int, Box], jax.Device]()
    single, shared = list[tuple[int, Box]](), list[tuple[int, Box]]()
    for number, (name, x) in enumerate(named_leaves(tree).items()):
        arrays.append(ArrayType(name, str(x.dtype), tuple(x.shape)))
        for box, devices in boxes_of(tuple(x.shape), x.sharding, everywhere=True).items():
            processes = {process_of(device) for device in devices}
            here = [one for one in processes if hosts[one] == hosts[process]]
            if not here or min(here) != process:
                continue
            own = (device for device in devices if process_of(device) == process)
            source[number, box] = min(own, key=lambda device: device.id)
            held = len({hosts[one] for one in processes})
            (single if held <= copies else shared).append((number, box))
    index = lambda parts: place_pieces(arrays, parts, size_of)  # noqa: E731
    return ProcessPieces(index(single), index(shared), source)


def size_of(dtype: str) -> int:
    """Return the bytes of an element, also of dtypes that NumPy alone does not know."""
    return int(jax.numpy.dtype(dtype).itemsize)
