"""The processes of a run at work: they meet, wait for one another with a limit, and part.

What goes between them here is a few bytes, by JAX's coordination service, which process 0 hosts;
arrays never do. With one process, everything returns at once.
"""

import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed  # JAX offers the key-value store nowhere else

from jaxpar.config import ConfigError

#: How long process 0, whose end ends the others, waits after a failure for them to end first.
LINGER_SECONDS = 2.0

_ROOT = "jaxpar"

#: Host of each process, once they have met.
hosts: list[str] = []

#: Numbers the questions of `any_process`.
_questions = itertools.count()

#: JAX's agreement on when to stop, once they have met.
stops: list[Any] = []

#: Numbers the questions of `agreed_to_stop`, by which JAX agrees: on the one after the latest that
#: any process has asked, or 1. Steps would not do. A run that goes on from step 500 would not come
#: by 1 any more after a signal during its start, and a rewind takes steps again.
_stop_questions = itertools.count(1)


class PeersMissing(Exception):
    """Some processes have not come to where the others wait."""


class PeerFailed(Exception):
    """Another process could not go on, and has said why."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code


def world_size() -> int:
    """Processes in this run; starts no backend."""
    return distributed.global_state.num_processes if _client() is not None else 1


def rank() -> int:
    """This process's number; starts no backend."""
    return distributed.global_state.process_id if _client() is not None else 0


def process_name(process: int) -> str:
    """A process as messages name it: "process 3 (gpu07)"."""
    return f"process {process}" + (f" ({hosts[process]})" if process < len(hosts) else "")


def _client() -> Any:
    return distributed.global_state.client


def exchange(name: str, text: str, seconds: float) -> list[str]:
    """Give a text, and get that of every process, in their order, once all have come.

    Args:     name: used once in a run, and the same in every process.
    Raises:   PeersMissing after so many seconds, naming those that have not come.
    """
    if _client() is None:
        return [text]
    folder = f"{_ROOT}/{name}"
    _client().key_value_set(f"{folder}/{rank()}", f"={text}")
    try:
        _client().wait_at_barrier(f"{folder}/all", int(1000 * seconds))
    except RuntimeError as error:
        there = read_published(folder)
        missing = [process_name(i) for i in range(world_size()) if i not in there]
        who = ", ".join(missing) or "nobody now"
        raise PeersMissing(f"{name}: after {seconds:.0f} s, still missing: {who}") from error
    there = read_published(folder)
    return [there[i][1:] for i in range(world_size())]


def any_process(happened: bool) -> bool:
    """Whether something has happened in some process. All ask, in the same order, and wait for all.

    However late the last one comes: over gloo, a first collective would fail after 30 s.
    """
    if _client() is None:
        return happened
    told = exchange(f"in any/{next(_questions)}", str(happened), 1e6)
    return str(True) in told


def publish(topic: str, text: str) -> None:
    """Leave a text for the others to read, in place of this process's last on the topic."""
    if _client() is not None:
        _client().key_value_set(f"{_ROOT}/{topic}/{rank()}", text, allow_overwrite=True)


def read_published(topic: str) -> dict[int, str]:
    """What processes have left on a topic so far."""
    if _client() is None:
        return {}
    topic = topic if topic.startswith(f"{_ROOT}/") else f"{_ROOT}/{topic}"
    return {int(k.rpartition("/")[2]): v for k, v in _client().key_value_dir_get(f"{topic}/")}


def all_or_none[T](name: str, seconds: float, work: Callable[[], T]) -> T:
    """Do a thing in every process, and go on only if it went well in all of them.

    Raises:   what `work` raised here; or PeerFailed, with the exit code 2 when the reason is a
              ConfigError, naming the first process in which it failed; or as `exchange`.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    code = 0 if failure is None else 2 if isinstance(failure, ConfigError) else 1
    told = exchange(name, f"{code} {failure or ''}", seconds)
    if failure is not None:
        raise failure
    for process, text in enumerate(told):
        status, _, reason = text.partition(" ")
        if status != "0":
            raise PeerFailed(f"{name}: {process_name(process)}: {reason}", int(status))
    return result


def check_same(what: str, text: Callable[[], str], seconds: float) -> None:
    """See that every process of the run has the same: two that differ would wait for ever.

    Args:     text: makes what is compared; it is not called when there is one process.
    Raises:   PeerFailed naming the first process that differs from process 0.
    """
    if world_size() == 1:
        return
    digests = exchange(what, hashlib.sha256(text().encode()).hexdigest(), seconds)
    for process, digest in enumerate(digests):
        if digest != digests[0]:
            name, first = process_name(process), process_name(0)
            rule = f"{name} has another {what} than {first}"
            raise PeerFailed(f"{rule}: start all with the same command, code and data", 2)


def leave(well: bool) -> None:
    """Leave the others, before this process ends.

    Args:     well: the run has ended in every process alike: all wait for all, for 30 s at most.
              Otherwise nobody is waited for, but that process 0 lets the others end before it.
    """
    if _client() is None:
        return
    if well:
        distributed.global_state.preemption_sync_manager = stops.pop()  # which it shuts down too
        with contextlib.suppress(RuntimeError):
            jax.distributed.shutdown()
        return
    with contextlib.suppress(RuntimeError):
        publish("parted", "")
    until = time.monotonic() + LINGER_SECONDS
    while rank() == 0 and time.monotonic() < until:
        with contextlib.suppress(RuntimeError):
            if len(read_published("parted")) == world_size():
                time.sleep(0.1)  # they have said so, and go
                return
        time.sleep(0.05)


def agreed_to_stop() -> bool:
    """Whether some process has got SIGTERM, and all have agreed to stop at this question.

    To be asked as often in every process, by the loop alone: the answer is the same in all, and
    true once. It communicates only once a signal has come.
    """
    return bool(stops) and stops[0].reached_sync_point(next(_stop_questions))


def log(text: str) -> None:
    """Print from the first process only."""
    if rank() == 0:
        print(text, flush=True)
