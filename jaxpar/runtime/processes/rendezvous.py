"""How the processes of a run meet."""

import errno
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import jax
from jax._src import distributed  # JAX offers the key-value store nowhere else

from jaxpar.config import ClusterConfig, Config, ConfigError, flag, replace
from jaxpar.runtime import start as runtime
from jaxpar.runtime.gpus import visible
from jaxpar.runtime.processes.detect import Environment, ProcessPlace, detect, is_loopback
from jaxpar.runtime.processes.peers import PeersMissing, exchange, hosts, log, stops

#: Seconds after which JAX gives up a process that has gone silent, and ends the others.
HEARTBEAT_SECONDS = 100


class PortTaken(PeersMissing):
    """None can come, since another program has the coordinator's port."""


def join(cfg: Config, report: Callable[[str], None] | None = None) -> tuple[Config, list[str]]:
    """Prepare this process for JAX, as one of a run's if it is: what a program does first.

    Args:     report: called with a line about the peers, once all have joined. None: `log`.
    Returns:  the config without the fields that say which process this is, since a run's identity
              does not depend on where its processes ran; and what was set, as `runtime.start`.
    Raises:   ConfigError as `cluster.detect` and `connect`.
    """
    found = detect(cfg, os.environ)
    environment = runtime.start(cfg, found.num_processes if found else 1)
    if found is None:
        return cfg, environment
    (report or log)(f"cluster    {connect(found, cfg.cluster.connect_seconds)}")
    own, places = ClusterConfig(), ("detect", "coordinator", "num_processes", "process_id")
    return replace(cfg, **{f"cluster.{name}": getattr(own, name) for name in places}), environment


def detect_peers(env: Environment = os.environ) -> ProcessPlace | None:
    """`detect` for programs without cluster options; None where variables are only half set."""
    try:
        return detect(Config(), env)
    except ConfigError:
        return None


def require_single_process(program: str, env: Environment = os.environ) -> None:
    """Refuse to run as one of several processes.

    Raises:   ConfigError naming the variables that say that there are more.
    """
    found = detect_peers(env)
    if found is not None:
        rule = f"is one of several, and {program} works in one process"
        fix = f"start it once: without srun or mpirun, and the variables of {found.source} unset"
        raise ConfigError("process", f"{found.process_id} of {found.num_processes}", rule, fix)


def connect(cluster: ProcessPlace, seconds: int) -> str:
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
    stops[:] = [distributed.global_state.preemption_sync_manager]
    distributed.global_state.preemption_sync_manager = None
    hosts[:] = exchange("hosts", socket.gethostname(), seconds)
    many = f", {len(set(hosts))} hosts" if len(set(hosts)) > 1 else ""
    seen = f", GPUs {','.join(map(str, devices))}" if devices else ""
    return f"{cluster}{many}{seen}"


def _give_up(cluster: ProcessPlace, seconds: int) -> NoReturn:
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


def local_gpus(cluster: ProcessPlace) -> list[int] | None:
    """This process's share of the GPUs it can see; None for all of them.

    Raises:   ConfigError when they cannot be shared out evenly.
    """
    shared = cluster.local_processes
    if shared == 1 or not visible.gpu_is_present():
        return None
    seen = visible.visible_gpus()
    if seen == 1:
        return None
    if seen % shared:
        rule = f"{shared} processes of this host see {seen} GPUs, and cannot share them evenly"
        fix = "give each its own, as srun --gpus-per-task does"
        raise ConfigError("CUDA_VISIBLE_DEVICES", seen, rule, fix)
    each = seen // shared
    return list(range(cluster.local_id * each, (cluster.local_id + 1) * each))


def _check_free(cluster: ProcessPlace) -> None:
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


def _check_reachable(cluster: ProcessPlace) -> None:
    """Raises:   ConfigError when the coordinator's name is unknown, or means this host."""
    path, fix = "cluster.coordinator", f"use another name of its: {flag('cluster.coordinator')}"
    try:
        found = socket.getaddrinfo(cluster.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return  # not known yet, perhaps: pods' names come late. Connecting tries for longer.
    if all(is_loopback(str(address[4][0])) for address in found) and not is_loopback(cluster.host):
        rule = f"is the loopback address {found[0][4][0]} on {socket.gethostname()}"
        raise ConfigError(path, cluster.coordinator, rule, fix)
