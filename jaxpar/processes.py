"""The processes of a run at work: they meet, wait for one another with a limit, and part.

What goes between them here is a few bytes, by JAX's coordination service, which process 0 hosts;
arrays never do. With one process, everything returns at once.
"""

import contextlib
import errno
import hashlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax._src import distributed  # JAX offers the key-value store nowhere else

from jaxpar import runtime, xla_flags
from jaxpar.cluster import Cluster, Environment, detect, is_loopback
from jaxpar.config import ClusterConfig, Config, ConfigError, flag, replace

#: Seconds after which JAX gives up a process that has gone silent, and ends the others.
HEARTBEAT_SECONDS = 100

#: How long process 0, whose end ends the others, waits after a failure for them to end first.
LINGER_SECONDS = 2.0

_ROOT = "jaxpar"

#: Host of each process, once they have met.
_hosts: list[str] = []

#: Numbers the questions of `in_any`.
_questions = itertools.count()

#: JAX's agreement on when to stop, once they have met.
_stops: list[Any] = []

#: Numbers the questions of `stop_is_agreed`, by which JAX agrees: on the one after the latest that
#: any process has asked, or 1. Steps would not do. A run that goes on from step 500 would not come
#: by 1 any more after a signal during its start, and a rewind takes steps again.
_stop_questions = itertools.count(1)


class PeersMissing(Exception):
    """Some processes have not come to where the others wait."""


class PortTaken(PeersMissing):
    """None can come, since another program has the coordinator's port."""


class PeerFailed(Exception):
    """Another process could not go on, and has said why."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code


def join(cfg: Config, tell: Callable[[str], None] | None = None) -> tuple[Config, list[str]]:
    """Prepare this process for JAX, as one of a run's if it is: what a program does first.

    Args:     tell: told of the others, once they have met; None: `say`.
    Returns:  the config, saying no longer which process this is: what a run is does not depend on
              where a process of it ran. And what was set, as `runtime.start`.
    Raises:   ConfigError as `cluster.detect` and `connect`.
    """
    found = detect(cfg, os.environ)
    environment = runtime.start(cfg, found.num_processes if found else 1)
    if found is None:
        return cfg, environment
    (tell or say)(f"cluster    {connect(found, cfg.cluster.connect_seconds)}")
    own, places = ClusterConfig(), ("detect", "coordinator", "num_processes", "process_id")
    return replace(cfg, **{f"cluster.{name}": getattr(own, name) for name in places}), environment


def others(env: Environment = os.environ) -> Cluster | None:
    """`detect`, for programs that have no options to say it: half-set variables start nobody."""
    try:
        return detect(Config(), env)
    except ConfigError:
        return None


def alone(program: str, env: Environment = os.environ) -> None:
    """Refuse to be one of several processes, in a program that works in one.

    Raises:   ConfigError naming what says that there are more.
    """
    found = others(env)
    if found is not None:
        rule = f"is one of several, and {program} works in one process"
        fix = f"start it once: without srun or mpirun, and the variables of {found.source} unset"
        raise ConfigError("process", f"{found.process_id} of {found.num_processes}", rule, fix)


def connect(cluster: Cluster, seconds: int) -> str:
    """Meet the other processes. Comes before JAX's backend starts, and after its flags are set.

    Args:     seconds: to wait for all of them. Then this process ends with code 1, and says why:
              JAX would abort it.
    Returns:  a line about it.
    Raises:   ConfigError when the coordinator's address cannot be, or GPUs not be shared out;
              PortTaken.
    """
    devices = local_gpus(cluster)
    if cluster.process_id == 0:
        _check_free(cluster)
    if cluster.process_id and (cluster.num_hosts or 1) > 1:
        _check_reachable(cluster)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timer = threading.Timer(seconds, _give_up, (cluster, seconds))
    timer.daemon = True
    timer.start()
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.num_processes,
        cluster.process_id,
        devices,
        cluster_detection_method="deactivate",
        initialization_timeout=seconds + 60,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=30,
        # JAX would listen on all addresses, of which another program may have the port on one.
        coordinator_bind_address=cluster.coordinator if is_loopback(cluster.host) else None,
    )
    timer.cancel()
    # It counts the calls of one thread. Orbax 0.12 calls it too, from the thread that ends a save,
    # with that save's step: between two calls of the loop, the count would go back. Taken from its
    # place, it is not found there, which Orbax takes for no preemption.
    _stops[:] = [distributed.global_state.preemption_sync_manager]
    distributed.global_state.preemption_sync_manager = None
    _hosts[:] = exchange("hosts", socket.gethostname(), seconds)
    many = f", {len(set(_hosts))} hosts" if len(set(_hosts)) > 1 else ""
    seen = f", GPUs {','.join(map(str, devices))}" if devices else ""
    return f"{cluster}{many}{seen}"


def _give_up(cluster: Cluster, seconds: int) -> NoReturn:
    """Say that the others have not come, and end."""
    port = int(cluster.coordinator.rpartition(":")[2])
    answer = "answers, so others are missing"
    try:
        socket.create_connection((cluster.host, port), 3).close()
    except OSError as error:
        answer = f"does not answer ({error})"
    told = f"{cluster}: the processes have not come together in {seconds} s; that address {answer}"
    if is_loopback(cluster.host):
        told += ". It is a loopback address, which processes on other hosts cannot reach"
    print(f"error: {told}", file=sys.stderr, flush=True)
    os._exit(1)


def local_gpus(cluster: Cluster) -> list[int] | None:
    """This process's share of the GPUs it can see; None for all of them.

    Raises:   ConfigError when they cannot be shared out evenly.
    """
    shared = cluster.local_processes
    if shared == 1 or not xla_flags.gpu_is_present():
        return None
    seen = xla_flags.visible_gpus()
    if seen == 1:
        return None
    if seen % shared:
        rule = f"{shared} processes of this host see {seen} GPUs, and cannot share them evenly"
        fix = "give each its own, as srun --gpus-per-task does"
        raise ConfigError("CUDA_VISIBLE_DEVICES", seen, rule, fix)
    each = seen // shared
    return list(range(cluster.local_id * each, (cluster.local_id + 1) * each))


def _check_free(cluster: Cluster) -> None:
    """Raises:   PortTaken when another program listens there: JAX would crash."""
    port = int(cluster.coordinator.rpartition(":")[2])
    own = cluster.host if is_loopback(cluster.host) else None
    found = socket.getaddrinfo(own, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                # As the coordinator does: `jaxpar.launch` holds the port for it in this way.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                fix = "end that, or give all processes another --cluster.coordinator HOST:PORT"
                told = f"{cluster}: another program on this host has port {port}. Fix: {fix}"
                raise PortTaken(told) from error


def _check_reachable(cluster: Cluster) -> None:
    """Raises:   ConfigError when the coordinator's name is unknown, or means this host."""
    path, fix = "cluster.coordinator", f"use another name of its: {flag('cluster.coordinator')}"
    try:
        found = socket.getaddrinfo(cluster.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return  # not known yet, perhaps: pods' names come late. Connecting tries for longer.
    if all(is_loopback(str(address[4][0])) for address in found) and not is_loopback(cluster.host):
        rule = f"is the loopback address {found[0][4][0]} on {socket.gethostname()}"
        raise ConfigError(path, cluster.coordinator, rule, fix)


def count() -> int:
    """Processes in this run; starts no backend."""
    return distributed.global_state.num_processes if _client() is not None else 1


def own() -> int:
    """This process's number; starts no backend."""
    return distributed.global_state.process_id if _client() is not None else 0


def name_of(process: int) -> str:
    """A process as messages name it: "process 3 (gpu07)"."""
    return f"process {process}" + (f" ({_hosts[process]})" if process < len(_hosts) else "")


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
    _client().key_value_set(f"{folder}/{own()}", f"={text}")
    try:
        _client().wait_at_barrier(f"{folder}/all", int(1000 * seconds))
    except RuntimeError as error:
        there = published(folder)
        missing = [name_of(i) for i in range(count()) if i not in there]
        who = ", ".join(missing) or "nobody now"
        raise PeersMissing(f"{name}: after {seconds:.0f} s, still missing: {who}") from error
    there = published(folder)
    return [there[i][1:] for i in range(count())]


def in_any(happened: bool) -> bool:
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
        _client().key_value_set(f"{_ROOT}/{topic}/{own()}", text, allow_overwrite=True)


def published(topic: str) -> dict[int, str]:
    """What processes have left on a topic so far."""
    if _client() is None:
        return {}
    topic = topic if topic.startswith(f"{_ROOT}/") else f"{_ROOT}/{topic}"
    return {int(k.rpartition("/")[2]): v for k, v in _client().key_value_dir_get(f"{topic}/")}


def together[T](name: str, seconds: float, work: Callable[[], T]) -> T:
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
            raise PeerFailed(f"{name}: {name_of(process)}: {reason}", int(status))
    return result


def check_same(what: str, text: Callable[[], str], seconds: float) -> None:
    """See that every process of the run has the same: two that differ would wait for ever.

    Args:     text: makes what is compared; it is not called when there is one process.
    Raises:   PeerFailed naming the first process that differs from process 0.
    """
    if count() == 1:
        return
    digests = exchange(what, hashlib.sha256(text().encode()).hexdigest(), seconds)
    for process, digest in enumerate(digests):
        if digest != digests[0]:
            name, first = name_of(process), name_of(0)
            rule = f"{name} has another {what} than {first}"
            raise PeerFailed(f"{rule}: start all with the same command, code and data", 2)


def part(well: bool) -> None:
    """Leave the others, before this process ends.

    Args:     well: the run has ended in every process alike: all wait for all, for 30 s at most.
              Otherwise nobody is waited for, but that process 0 lets the others end before it.
    """
    if _client() is None:
        return
    if well:
        distributed.global_state.preemption_sync_manager = _stops.pop()  # which it shuts down too
        with contextlib.suppress(RuntimeError):
            jax.distributed.shutdown()
        return
    with contextlib.suppress(RuntimeError):
        publish("parted", "")
    until = time.monotonic() + LINGER_SECONDS
    while own() == 0 and time.monotonic() < until:
        with contextlib.suppress(RuntimeError):
            if len(published("parted")) == count():
                time.sleep(0.1)  # they have said so, and go
                return
        time.sleep(0.05)


def stop_is_agreed() -> bool:
    """Whether some process has got SIGTERM, and all have agreed to stop at this question.

    To be asked as often in every process, by the loop alone: the answer is the same in all, and
    true once. It communicates only once a signal has come.
    """
    return bool(_stops) and _stops[0].reached_sync_point(next(_stop_questions))


def say(text: str) -> None:
    """Print from the first process only."""
    if own() == 0:
        print(text, flush=True)
