"""Fingerprints of small arrays by NumPy, instead of a program for each state and mesh.

Compiling that program took 0.6 CPU seconds for each, 72 times in a whole run. That NumPy gives
the same numbers is what tests/sharding/test_fingerprint.py is for; runs of several processes, and
programs that tests start, have the program, and their fingerprints are compared with these.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxpar.sharding import fingerprint

#: The program itself.
PROGRAM = fingerprint._program


@contextlib.contextmanager
def quickly_computed() -> Iterator[None]:
    """Compute fingerprints by NumPy."""
    before = fingerprint._program
    fingerprint._program = program_now
    try:
        yield
    finally:
        fingerprint._program = before


def program_now(shardings: Any) -> Any:
    """What `program_of` gives now: one function for all contexts, as tests/kept_steps.py looks."""
    return program_of(shardings)


def program_of(shardings: Any) -> Any:
    """What computes instead. A test that looks at compilations sets `PROGRAM`."""
    return Quick()


class Quick:
    """What `jaxpar.sharding.fingerprint._program` gives, without a compilation."""

    def __call__(self, arrays: Sequence[jax.Array]) -> np.ndarray:
        return np.stack([sums_of(np.asarray(x)) for x in jax.device_get(arrays)])

    def lower(self, arrays: Any) -> "Quick":
        return self

    def compile(self) -> "Quick":
        return self


def sums_of(x: np.ndarray) -> np.ndarray:
    """A fingerprint's two sums, uint32 [2]."""
    golden = np.uint32(fingerprint._GOLDEN)
    rows = x.reshape(x.shape[0], -1) if x.ndim else x.reshape(1, 1)
    bits = rows.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize]).astype(np.uint32)
    row = hash_of(np.arange(bits.shape[0], dtype=np.uint32) + golden)
    column = np.arange(bits.shape[1], dtype=np.uint32)
    first = hash_of(bits ^ hash_of(column ^ row[:, None]))
    second = hash_of(first + golden)
    return np.array([np.sum(s, dtype=np.uint32) for s in (first, second)])


def hash_of(x: np.ndarray) -> np.ndarray:
    """`jaxpar.sharding.hashing.hash_uint32`."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
