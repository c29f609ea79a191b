"""The processes of this process that tokenize streamed datasets."""

import functools
import threading

import numpy as np

from jaxpar.data.processes import Process
from jaxpar.data.stream.index import PART
from jaxpar.data.stream.texts import PartEncoder


def encode(folder: str, packed: bytes) -> list[np.ndarray]:
    """Return the tokens of parts, as `PartEncoder.encode`. Args:     packed: PART [parts]."""
    return _encoder(folder).encode(np.frombuffer(packed, PART))


_encoder = functools.cache(PartEncoder)


class Pool:
    """Worker processes that share the parts of a request."""

    def __init__(self, count: int):
        what = "tokenizes a streamed dataset"
        self._workers = [Process(encode, what) for _ in range(count)]
        self._lock = threading.Lock()

    def encode(self, folder: str, parts: np.ndarray) -> list[np.ndarray]:
        """Return the tokens of each part, as `PartEncoder.encode`.

        The same worker always gets the same part, which it may still have.

        Raises:   ConfigError and OSError as `PartEncoder.encode`; RunError if a worker has ended.
        """
        owner = parts["check"] % len(self._workers)
        shares = [np.flatnonzero(owner == i) for i in range(len(self._workers))]
        with self._lock:
            busy = [(w, at) for w, at in zip(self._workers, shares, strict=True) if len(at)]
            for worker, at in busy:
                worker.ask(folder, parts[at].tobytes())
            replies = [worker.answer() for worker, _ in busy]
        found: list[np.ndarray] = [np.empty(0, np.int32)] * len(parts)
        for (_, at), reply in zip(busy, replies, strict=True):
            for i, ids in zip(at, reply, strict=True):
                found[i] = ids
        return found


@functools.cache
def pool(count: int) -> Pool:
    """Return this process's pool of `count` workers, which all streamed datasets share."""
    return Pool(count)
