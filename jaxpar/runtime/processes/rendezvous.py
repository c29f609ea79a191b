"""Connect the processes of a run."""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax

from jaxpar.config import ClusterConfig, Config, ConfigError, flag, replace
from jaxpar.jax_private.table import DISTRIBUTED
from jaxpar.runtime import start as runtime
from jaxpar.runtime.gpus import visible
from jaxpar.runtime.gpus.numa import bind_process
from jaxpar.runtime.processes import gloo, mtls
from jaxpar.runtime.processes.addresses import is_loopback, resolved
from jaxpar.runtime.processes.detect import Environment, ProcessPlace, detect
from jaxpar.runtime.processes.listening import bind_address, check_free, warn_if_open
from jaxpar.runtime.processes.networks.choosing import between_hosts
from jaxpar.runtime.processes.own_gpus import check_own, identities, local_gpus, taken
from jaxpar.runtime.processes.peers import exchange, hosts, log, process_name, stops
from jaxpar.runtime.stages import stage

#: Seconds without a heartbeat after which JAX considers a process dead and ends the others.
HEARTBEAT_SECONDS = 100


def join(cfg: Config, report: Callable[[str], None] | None = None) -> tuple[Config, list[str]]:
    """Prepare this process for JAX, and connect it to the other processes of its run, if any.

    Programs call this first.

    Args:     report: called with a line about the peers, once all have joined. None: `log`.
    Returns:  the config without the fields that identify this process, since a run's identity does
              not depend on where its processes ran; and the settings that `runtime.start` returns.
    Raises:   ConfigError as `cluster.detect`, `connect` and `between_hosts`.
    """
    found = detect(cfg, os.environ)
    bound = bind_process(share=local_gpus(found) if found else None)
    environment = runtime.start(cfg, found.num_processes if found else 1)
    if found is None:
        return cfg, bound + environment
    seconds = cfg.cluster.connect_seconds
    (report or log)(f"cluster    {connect(found, seconds)}")
    environment += bound
    environment += between_hosts(cfg.cluster.network, found.host, seconds, report or log)
    own, places = ClusterConfig(), ("detect", "coordinator", "num_processes", "process_id")
    return replace(cfg, **{f"cluster.{name}": getattr(own, name) for name in places}), environment


def detect_peers(env: Environment = os.environ) -> ProcessPlace | None:
    """Run `detect` for a program without cluster options; None if variables are incomplete."""
    try:
        return detect(Config(), env)
    except ConfigError:
        return None


def require_single_process(program: str, env: Environment = os.environ) -> None:
    """Check that this is not one of several processes.

    Raises:   ConfigError that names the variables that declare several processes.
    """
    found = detect_peers(env)
    if found is not None:
        rule = f"is one of several processes, but {program} runs in a single process"
        fix = f"start it without srun or mpirun, and unset the variables of {found.source}"
        raise ConfigError("process", f"{found.process_id} of {found.num_processes}", rule, fix)


def connect(cluster: ProcessPlace, seconds: int) -> str:
    """Connect to the other processes, after JAX's flags are set and before its backend starts.

    Args:     seconds: to wait for all processes. After that, this process ends with code 1 and a
              message, since JAX would abort it without one.
    Returns:  a line that describes the connected processes.
    Raises:   ConfigError if the coordinator's address is invalid or the GPUs cannot be shared
              evenly, two processes take the same one, or certificates are unusable; PortTaken.
    """
    devices, certificates = local_gpus(cluster), mtls.arguments()
    bound = None
    if cluster.process_id == 0 and cluster.serves:
        bound = bind_address(cluster)
        check_free(cluster, bound)
        warn_if_open(cluster, bound)
    if cluster.process_id and (cluster.num_hosts or 1) > 1:
        _check_reachable(cluster)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timer = threading.Timer(seconds, _give_up, (cluster, seconds))
    timer.daemon = True
    timer.start()
    waiting = stage(f"waiting for the {cluster.num_processes} processes of the run")
    with waiting, contextlib.nullcontext() if cluster.serves else _served_elsewhere():
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.num_processes,
            cluster.process_id,
            devices,
            cluster_detection_method="deactivate",
            initialization_timeout=seconds + 60,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=30,
            # JAX would listen on all addresses: others could join, or have the port on one of them.
            coordinator_bind_address=bound,
            **certificates,
        )
    timer.cancel()
    # The manager counts the calls of one thread. Orbax 0.12 also calls it, from the thread that
    # finishes a save, with the step of that save, which would decrease the count between two calls
    # of the loop. Without a manager in this place, Orbax assumes that there is no preemption.
    state = DISTRIBUTED.load().global_state
    stops[:] = [state.preemption_sync_manager]
    state.preemption_sync_manager = None
    _meet(cluster, devices, seconds)
    gloo.listen_where_peers_connect(cluster, lambda own: exchange("gloo", own, seconds))
    many = f", {len(set(hosts))} hosts" if len(set(hosts)) > 1 else ""
    passed_over = f"; passed over: {cluster.passed_over}" if cluster.passed_over else ""
    return f"{cluster}{many}{passed_over}"


def _meet(cluster: ProcessPlace, devices: list[int] | None, seconds: int) -> None:
    """Exchange hosts and GPUs, and print which GPUs this process takes."""
    known = identities(devices)
    told = exchange("hosts", "\n".join([socket.gethostname(), *known]), seconds)
    claims = [(host, gpus) for host, *gpus in (text.split("\n") for text in told)]
    hosts[:] = [host for host, _ in claims]
    if visible.gpu_is_present():
        name = process_name(cluster.process_id)
        print(f"cluster    {name} takes {taken(devices, known)}", flush=True)
    check_own(claims)


class _Elsewhere:
    """Stands for the coordination service in process 0, whose launcher runs it."""

    def shutdown(self) -> None:
        """Leave it to the launcher."""


@contextlib.contextmanager
def _served_elsewhere() -> Iterator[None]:
    """Keep process 0 from starting a coordination service: JAX has no option for that."""
    library = DISTRIBUTED.load()._jax
    start = library.get_distributed_runtime_service
    library.get_distributed_runtime_service = lambda *_, **__: _Elsewhere()
    try:
        yield
    finally:
        library.get_distributed_runtime_service = start


def _give_up(cluster: ProcessPlace, seconds: int) -> NoReturn:
    """Report that the other processes have not connected, and end this process."""
    port = int(cluster.coordinator.rpartition(":")[2])
    answer = "answers, so other processes are missing"
    try:
        socket.create_connection((cluster.host, port), 3).close()
    except OSError as error:
        answer = f"does not answer ({error})"
    told = f"{cluster}: not all processes connected within {seconds} s; this address {answer}"
    if is_loopback(cluster.host):
        told += ". It is a loopback address, which processes on other hosts cannot reach"
    print(f"error: {told}", file=sys.stderr, flush=True)
    os._exit(1)


def _check_reachable(cluster: ProcessPlace) -> None:
    """Raise ConfigError if the coordinator's name resolves to this host."""
    path, fix = "cluster.coordinator", f"use another name: {flag('cluster.coordinator')}"
    found = resolved(cluster.host)
    if not found:
        return  # perhaps not known yet, as names of new pods; connecting retries for longer
    if all(map(is_loopback, found)) and not is_loopback(cluster.host):
        rule = f"is the loopback address {found[0]} on {socket.gethostname()}"
        raise ConfigError(path, cluster.coordinator, rule, fix)
