"""Batches of users: `DataSource`, a function of seed and step, or of a position. Imports no JAX."""

import json
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from msgspec import Struct

from jaxpar.config import Config, ConfigError, declared
from jaxpar.config.declared import Count
from jaxpar.config.json_reader import read_json
from jaxpar.config.values import Value

if TYPE_CHECKING:
    from jaxpar.sharding.batch import Batch

#: The arrays of a batch that a source may return.
ARRAYS = ("tokens", "labels", "segment_ids", "positions")

#: Most bytes of a state, as JSON.
MAX_STATE = 1_000_000

#: Most digits of an integer in a state: NumPy's generators have integers of 128 bits.
_DIGITS = 40


class DataSource(Value):
    """Training batches: a value of `data.source`. Define `__call__`, or `start` and `next`.

    With `__call__`, a batch is a function of seed and step. With `start` and `next`, it is one of a
    state, which says where the data goes on, and which each checkpoint has. In both cases, a run
    that resumes, on any mesh and number of processes, gets the same batches. Each process computes
    the global batch, and keeps its rows.
    """

    kind: ClassVar[str] = "DataSource"

    def check(self, cfg: Config, path: str) -> None:
        if cfg.train.loss is not None and cfg.train.loss.reads:
            rule = f"has no {cfg.train.loss.reads[0]}, which train.loss reads"
            raise ConfigError(path, type(self).__name__, rule, "use data.mixture")
        names = ("__call__", "start", "next")
        own = [n for n in names if getattr(type(self), n) is not getattr(DataSource, n)]
        if own not in (["__call__"], ["start", "next"]):
            rule = f"defines {' and '.join(own) or 'no batches'}"
            fix = "define __call__ alone, or start and next"
            raise ConfigError(path, type(self).__name__, rule, fix)

    def __call__(self, seed: int, step: int, shape: tuple[int, int]) -> Any:
        """Return a global batch.

        Args:
            seed: `train.seed`.
            step: from 0; of a run that skips batches, the number of the batch.
            shape: B, sequences of the batch, and T, their tokens.
        Returns:  the text, integers [B, T + 1]: the labels are its next tokens. Or a dict of
                  "tokens", "labels" (-1: none), "segment_ids" (documents, from 1) and "positions"
                  in them, integers [B, T] each; "tokens" and "labels" are needed.
        """
        raise NotImplementedError

    def start(self, seed: int) -> Any:
        """Return the state before the first batch.

        Args:
            seed: `train.seed`.
        Returns:  JSON: numbers, texts, booleans, None, and lists and dicts of them; up to 1 MB.
        """
        raise NotImplementedError

    def next(self, state: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
        """Return the global batch that follows a state, and the state after it.

        A function of its arguments: a run may ask for a batch again, and does so from a thread.

        Args:
            state: what `start` or `next` has returned.
            shape: B, sequences of the batch, and T, their tokens.
        Returns:  the batch, as `__call__` returns it, and the next state.
        """
        raise NotImplementedError


class Positions:
    """The batches of a source with `next`, by number, and its state before each.

    A state is a function of the number of its batch: it follows from an earlier one by calls of
    `next`, also for batches that are skipped. Those of the latest batches are kept, as JSON, so
    that no call changes them, and a run that resumes gets what one without a break gets.
    """

    def __init__(
        self,
        source: DataSource,
        seed: int,
        shape_of: Callable[[int], tuple[int, int]],
        most: int,
    ):
        """
        Args:     shape_of: returns B and T of a batch. most: states that are kept.
        """
        self._source, self._seed, self._shape_of, self._most = source, seed, shape_of, most
        self._first: dict[int, str] = {}
        self._kept: dict[int, str] = {}
        self._lock = threading.Lock()

    def go_on(self, position: str) -> None:
        """Go on from what `before` has returned; "": from the start.

        Raises:   UnreadableJson for anything else.
        """
        first = {}
        if position:
            found = declared.convert(_Position, _read(position), "the position")
            first[found.batch] = json.dumps(found.state)
        with self._lock:
            self._first, self._kept = first, {}

    def before(self, batch: int) -> str:
        """Return the position before a batch, for checkpoints: its number, and the state."""
        return f'{{"batch": {batch}, "state": {self._state(batch)}}}'

    def made(self, batch: int) -> Any:
        """Return what the source makes for a batch."""
        made, after = self._next(batch, self._state(batch))
        self._keep(batch + 1, after)
        return made

    def _state(self, batch: int) -> str:
        with self._lock:
            known = self._first | self._kept
        if batch in known:
            return known[batch]
        at = max((number for number in known if number < batch), default=0)
        state = known.get(at) or self._json("start", self._source.start(self._seed))
        for number in range(at, batch):
            _, state = self._next(number, state)
        self._keep(batch, state)
        return state

    def _next(self, batch: int, state: str) -> tuple[Any, str]:
        made = self._source.next(_read(state), self._shape_of(batch))
        if not isinstance(made, tuple) or len(made) != 2:
            rule = f"next() returns a {type(made).__name__}"
            fix = "return a batch and the state after it"
            raise ConfigError("data.source", type(self._source).__name__, rule, fix)
        return made[0], self._json("next", made[1])

    def _keep(self, batch: int, state: str) -> None:
        with self._lock:
            self._kept.pop(batch, None)
            self._kept[batch] = state
            while len(self._kept) > self._most:
                del self._kept[next(iter(self._kept))]

    def _json(self, method: str, state: Any) -> str:
        """Return a state as JSON, from which it is read as it is."""
        name, rule = type(self._source).__name__, f"{method}() returns a state"
        try:
            text = json.dumps(state, allow_nan=False)
            same = len(text) > MAX_STATE or _read(text) == state
            why = "" if same else "it is read as another value"
        except (TypeError, ValueError, RecursionError) as error:
            why = str(error)
        if why:
            fix = "use int(x) for an array, lists in place of tuples, and texts as keys"
            raise ConfigError("data.source", name, f"{rule} that is not JSON ({why})", fix)
        if len(text) > MAX_STATE:
            rule += f" of {len(text):,} bytes as JSON, above {MAX_STATE:,}"
            fix = "let it say where the data goes on, without the data"
            raise ConfigError("data.source", name, rule, fix)
        return text


class _Position(Struct, frozen=True, kw_only=True):
    """What a checkpoint has of a source with `next`."""

    batch: Count
    """The number of the next batch."""
    state: Any
    """The state before it."""


def _read(text: str) -> Any:
    # Some bytes more than the state's, for the position around it.
    most = MAX_STATE + 100
    return read_json(text.encode(), what="it", max_bytes=most, max_digits=_DIGITS)


def iterates(source: DataSource) -> bool:
    """Whether a source has `start` and `next`."""
    return type(source).next is not DataSource.next


def checked(source: DataSource, made: Any, shape: tuple[int, int], cfg: Config) -> "Batch":
    """Return what a source made as a batch of int32 arrays.

    Raises:   ConfigError for other arrays, shapes or tokens.
    """
    from jaxpar.sharding.batch import Batch

    rows, length = shape
    if not isinstance(made, Mapping):
        text = np.asarray(made)
        _require(source, text, "the text", (rows, length + 1))
        made = {"tokens": text[:, :-1], "labels": text[:, 1:]}
    if not {"tokens", "labels"} <= made.keys() <= set(ARRAYS):
        rule = f"returns the arrays {', '.join(made)}"
        fix = f"return tokens and labels, and no others than {', '.join(ARRAYS)}"
        raise ConfigError("data.source", type(source).__name__, rule, fix)
    place = np.broadcast_to(np.arange(length), shape)
    arrays: dict[str, Any] = {"segment_ids": np.ones(shape), "positions": place} | dict(made)
    for name, a in made.items():
        _require(source, np.asarray(a), name, shape)
    for name in ("tokens", "labels"):
        low, high = np.min(arrays[name]), np.max(arrays[name])
        if low < -(name == "labels") or high >= cfg.model.vocab_size:
            rule = f"returns {name} from {low} to {high}"
            fix = f"return ids below model.vocab_size = {cfg.model.vocab_size}"
            raise ConfigError("data.source", type(source).__name__, rule, fix)
    arrays = {name: np.asarray(a, np.int32) for name, a in arrays.items()}
    return Batch(**arrays)


def _require(source: DataSource, a: np.ndarray, name: str, shape: tuple[int, int]) -> None:
    if a.shape != shape or not np.issubdtype(a.dtype, np.integer):
        rule = f"returns {name} as {a.dtype} {list(a.shape)}"
        fix = f"return integers {list(shape)}"
        raise ConfigError("data.source", type(source).__name__, rule, fix)
