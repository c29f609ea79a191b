"""Communication between the processes of a run: exchange texts, agree, wait and shut down.

They exchange a few bytes through JAX's coordination service, which process 0 hosts; never arrays.
With one process, every function returns at once.
"""

import contextlib
import hashlib
import itertools
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.jax_private.table import DISTRIBUTED
from jaxpar.runtime import terminal

#: How long process 0 waits after a failure for the others to exit first: its exit ends them.
LINGER_SECONDS = 2.0

_ROOT = "jaxpar"

#: Host of each process, once they are connected.
hosts: list[str] = []

#: Numbers the calls of `any_process` and `of_first`.
_questions = itertools.count()

#: JAX's preemption manager, once the processes are connected.
stops: list[Any] = []

#: Numbers the calls of `agreed_to_stop`. JAX agrees on the call after the latest of any process, or
#: on 1. Step numbers do not work: a run resumed at step 500 never reaches 1 after a signal during
#: startup, and a rewind repeats steps.
_stop_questions = itertools.count(1)


class PeersMissing(Exception):
    """Some processes have not reached a point where the others wait."""


class PeerFailed(Exception):
    """Another process failed, and has reported why."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code


def world_size() -> int:
    """Return the number of processes in this run. Starts no backend."""
    return _state().num_processes if _client() is not None else 1


def rank() -> int:
    """Return the index of this process, from 0. Starts no backend."""
    return _state().process_id if _client() is not None else 0


def processes_here() -> int:
    """Return the number of the run's processes on this host, this one included."""
    return max(hosts.count(socket.gethostname()), 1)


def process_name(process: int) -> str:
    """Return the name of a process for messages: "process 3 (gpu07)"."""
    return f"process {process}" + (f" ({hosts[process]})" if process < len(hosts) else "")


def _client() -> Any:
    return _state().client if "jax" in sys.modules else None


def _state() -> Any:
    """Return JAX's state, which has the key-value store: it is offered nowhere else. The launcher,
    which is not one of the processes, never imports JAX."""
    return DISTRIBUTED.load().global_state


def exchange(name: str, text: str, seconds: float) -> list[str]:
    """All-gather a text: returns that of every process, by rank, once all have called.

    Every process reads as many texts as there are processes: use `reports` where most have nothing
    to say.

    Args:     name: the same in every process, and used once in a run.
    Raises:   PeersMissing after `seconds`, naming the processes that have not called.
    """
    there = reports(name, text, seconds)
    return [there[i] for i in range(world_size())]


def reports(name: str, text: str | None, seconds: float) -> dict[int, str]:
    """Return the texts of the processes that have one, by rank, once all have called.

    The work of a process grows with the number of texts, not with that of processes.

    Args:     name: as in `exchange`. text: None if this process has nothing to say.
    Raises:   as `exchange`.
    """
    if _client() is None:
        return {} if text is None else {0: text}
    folder = f"{_ROOT}/{name}"
    if text is not None:
        _client().key_value_set(f"{folder}/texts/{rank()}", f"={text}")
    _client().key_value_set(f"{folder}/there/{rank()}", "")
    try:
        _client().wait_at_barrier(f"{folder}/all", int(1000 * seconds))
    except RuntimeError as error:
        there = read_published(f"{folder}/there")
        missing = [process_name(i) for i in range(world_size()) if i not in there]
        who = ", ".join(missing) or "none by now"
        raise PeersMissing(f"{name}: after {seconds:.0f} s, still missing: {who}") from error
    return {i: found[1:] for i, found in read_published(f"{folder}/texts").items()}


def any_process(happened: bool) -> bool:
    """Return whether `happened` is true in any process.

    All processes call this in the same order, and wait for each other without a limit. Over gloo, a
    first collective would fail after 30 s.
    """
    if _client() is None:
        return happened
    return bool(reports(f"in any/{next(_questions)}", "" if happened else None, 1e6))


def publish(topic: str, text: str) -> None:
    """Publish a text for the other processes; it replaces this process's last one on the topic."""
    if _client() is not None:
        _client().key_value_set(f"{_ROOT}/{topic}/{rank()}", text, allow_overwrite=True)


def read_published(topic: str) -> dict[int, str]:
    """Return the texts that processes have published on a topic so far, by rank."""
    if _client() is None:
        return {}
    topic = topic if topic.startswith(f"{_ROOT}/") else f"{_ROOT}/{topic}"
    return {int(k.rpartition("/")[2]): v for k, v in _client().key_value_dir_get(f"{topic}/")}


def all_or_none[T](name: str, seconds: float, work: Callable[[], T]) -> T:
    """Run `work` in every process, and return only if it succeeded in all of them.

    Raises:   the exception of `work` in this process; PeerFailed that names the first process in
              which it failed, with exit code 2 for a ConfigError; or as `exchange`.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    code = 2 if isinstance(failure, ConfigError) else 1
    failed = reports(name, None if failure is None else f"{code} {failure}", seconds)
    if failure is not None:
        raise failure
    for process in sorted(failed):
        status, _, reason = failed[process].partition(" ")
        raise PeerFailed(f"{name}: {process_name(process)}: {reason}", int(status))
    return result


def of_first(what: str, work: Callable[[], str], seconds: float) -> str:
    """Run `work` in process 0, and return its result in every process. All call this in order.

    Raises:   as `all_or_none`.
    """
    name = f"{what}/{next(_questions)}"
    own = all_or_none(name, seconds, lambda: work() if rank() == 0 else "")
    return reports(f"{name}/found", own if rank() == 0 else None, seconds)[0]


def check_same(what: str, value: Callable[[], str | bytes], seconds: float) -> None:
    """Check that every process has the same value, since processes that differ could deadlock.

    Args:     value: returns the value to compare; not called in a run of one process.
    Raises:   PeerFailed naming the first process that differs from process 0.
    """
    if world_size() == 1:
        return
    given = value()
    content = given.encode() if isinstance(given, str) else given
    own = hashlib.sha256(content).hexdigest()
    first = reports(what, own if rank() == 0 else None, seconds)[0]
    for process in sorted(reports(f"{what}/differs", None if own == first else "", seconds)):
        name = process_name(process)
        rule = f"{name} has a different {what} than {process_name(0)}"
        raise PeerFailed(f"{rule}: start all with the same command, code and data", 2)


def leave(well: bool) -> None:
    """Leave the run, before this process exits.

    Args:     well: the run ended in the same way in every process, and they wait for each other, at
              most 30 s. Otherwise they do not wait, except that process 0 lets the others exit
              first.
    """
    if _client() is None:
        return
    if well:
        import jax

        _state().preemption_sync_manager = stops.pop()  # which it shuts down too
        with contextlib.suppress(RuntimeError):
            jax.distributed.shutdown()
        return
    with contextlib.suppress(RuntimeError):
        publish("parted", "")
    until = time.monotonic() + LINGER_SECONDS
    while rank() == 0 and time.monotonic() < until:
        with contextlib.suppress(RuntimeError):
            if len(read_published("parted")) == world_size():
                time.sleep(0.1)  # they have reported it, and exit
                return
        time.sleep(0.05)


def agreed_to_stop() -> bool:
    """Return whether a process has received SIGTERM and all have agreed to stop at this call.

    Only the training loop calls this, equally often in every process. The result is the same in all
    processes, and true once. It communicates only after a signal has arrived.
    """
    return bool(stops) and stops[0].reached_sync_point(next(_stop_questions))


def log(text: str) -> None:
    """Print a text in process 0 only."""
    if rank() == 0:
        terminal.say(text)
