"""Connects the processes of a run: who listens where, and which GPUs each one takes.

JAX's coordination service, in process 0, asks for no password. It therefore listens only on the
address that the run names, not on every network of the host.

Gloo makes the collectives of CPU devices in several processes. By default it takes the address of
the host's own name. On many hosts /etc/hosts has 127.0.1.1 there, and then no other host can
connect.
"""

import contextlib
import errno
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

import jax
from jax.extend import backend

from jaxpar.config import ConfigError, flag
from jaxpar.config.numerals import only_digits
from jaxpar.jax_private.table import CPU_CLIENT, DISTRIBUTED, GLOO
from jaxpar.runtime.gpus import numa, nvml, visible
from jaxpar.runtime.processes import mtls
from jaxpar.runtime.processes.addresses import (
    address_towards,
    bind_error,
    is_here,
    is_loopback,
    joined,
    resolved,
)
from jaxpar.runtime.processes.peers import PeersMissing, exchange, hosts, process_name, stops
from jaxpar.runtime.processes.sources import ProcessPlace
from jaxpar.runtime.stages import stage
from jaxpar.runtime.terminal import warn

#: JAX's variable for the GPUs of a process: indices among those that it sees.
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"


def local_gpus(
    cluster: ProcessPlace, env: Mapping[str, str] = os.environ, present: bool | None = None
) -> list[int] | None:
    """Return this process's share of the visible GPUs; None for all of them.

    JAX_LOCAL_DEVICE_IDS goes before what the launcher says.

    Args:     present: whether the host has GPUs that JAX may use. None: look.
    Raises:   ConfigError if they cannot be shared evenly, or for other values of the variable than
              indices of visible GPUs.
    """
    if not (visible.gpu_is_present() if present is None else present):
        return None
    seen = len(visible.visible_gpu_ids(env))
    if env.get(LOCAL_DEVICES):
        named = env[LOCAL_DEVICES].split(",")
        if not all(only_digits(n) and len(n) < 6 and int(n) < seen for n in named):
            rule, fix = f"is not a list of GPUs from 0 to {seen - 1}", "use, for example, 0,1"
            raise ConfigError(LOCAL_DEVICES, env[LOCAL_DEVICES], rule, fix)
        return [int(n) for n in named]
    shared = cluster.local_processes
    if shared == 1 or seen <= 1:
        return None
    if seen % shared:
        rule = f"{shared} processes of this host cannot share {seen} GPUs evenly"
        fix = "assign GPUs to each process, as srun --gpus-per-task does"
        raise ConfigError("CUDA_VISIBLE_DEVICES", seen, rule, fix)
    if cluster.local_id >= shared:
        rule = f"is not one of the {shared} processes of this host, counted from 0"
        fix = f"name the GPUs of each process: {LOCAL_DEVICES}=0 for the first one"
        raise ConfigError(f"local rank of {cluster.source}", cluster.local_id, rule, fix)
    each = seen // shared
    return list(range(cluster.local_id * each, (cluster.local_id + 1) * each))


def identities(share: list[int] | None) -> list[str]:
    """Return the UUIDs of the GPUs that this process takes; none if they are not known.

    Only the driver knows which GPUs a job's cgroup shows: two processes may both have number 0.

    Args:     share: as `local_gpus` returns it.
    """
    if not visible.gpu_is_present():
        return []
    ids = visible.visible_gpu_ids()
    ids = ids if share is None else [ids[i] for i in share]
    try:
        there = nvml.addresses()
    except nvml.Unavailable:
        there = {}
    found = [
        name
        if name.startswith("MIG-")
        else "".join(there[address] for address in numa.addresses_of([name], there))
        for name in ids
    ]
    return found if all(found) else []


def taken(share: list[int] | None, known: list[str]) -> str:
    """Return what a process took, as "GPU 3 of the 8 that it sees (GPU-...)"."""
    seen = len(visible.visible_gpu_ids())
    own = list(range(seen)) if share is None else share
    names = f" ({', '.join(known)})" if known else ""
    which = f"GPU{'s' * (len(own) != 1)} {','.join(map(str, own))}" if own else "no GPU"
    return f"{which} of the {seen} that it sees{names}"


def check_own(claims: list[tuple[str, list[str]]]) -> None:
    """Check that no two processes take the same GPU.

    Args:     claims: host and UUIDs of each process's GPUs, by rank.
    Raises:   ConfigError that names the first two, and how many GPUs are taken twice.
    """
    first: dict[str, int] = {}
    twice: list[tuple[str, int, int]] = []
    for rank, (_, gpus) in enumerate(claims):
        for gpu in gpus:
            if first.setdefault(gpu, rank) != rank:
                twice.append((gpu, first[gpu], rank))
    if not twice:
        return
    gpu, one, other = twice[0]
    more = len({gpu for gpu, *_ in twice}) - 1
    also = f", and {more} more GPU{'s' * (more > 1)} like it" if more else ""
    rule = f"processes {one} and {other} on {claims[other][0]} both took it{also}"
    fix = "start each process with GPUs of its own: srun --gpus-per-task=1, or set "
    raise ConfigError("GPU", gpu, rule, fix + f"{LOCAL_DEVICES} in each")


#: Seconds without a heartbeat after which JAX considers a process dead and ends the others.
HEARTBEAT_SECONDS = 100

#: JAX's variable for the address to listen on, which is used as it is.
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"


class PortTaken(PeersMissing):
    """No process can connect, since another program uses the coordinator's port."""


def bind_address(cluster: ProcessPlace) -> str | None:
    """Return host:port for process 0 to listen on; None for every address of this host.

    None if the coordinator's name resolves to no address of this host that others
    can reach: behind a Kubernetes service or a NAT, or if /etc/hosts has 127.0.1.1 for the host's
    own name.
    """
    if BIND_ADDRESS in os.environ:
        return os.environ[BIND_ADDRESS]
    if is_loopback(cluster.host):
        return cluster.coordinator
    found = resolved(cluster.host)
    own = [address for address in found if is_here(address)]
    reached = own if cluster.num_hosts == 1 else [one for one in own if not is_loopback(one)]
    if not reached:
        return None
    port = int(cluster.coordinator.rpartition(":")[2])
    return cluster.coordinator if len(reached) == len(found) else joined(reached[0], port)


def warn_if_open(cluster: ProcessPlace, bound: str | None) -> None:
    """Warn if the coordinator listens on every address of this host.

    Args:     bound: from `bind_address`.
    """
    if bound is None:
        told = f"the coordinator listens on every network of {socket.gethostname()}: "
        told += f"{cluster.host} is none of its addresses; {BIND_ADDRESS}=ADDRESS:PORT names one"
        warn(told)


def check_free(cluster: ProcessPlace, bound: str | None) -> None:
    """Check that no other program uses the coordinator's port, on which JAX would crash.

    Args:     bound: from `bind_address`.
    Raises:   PortTaken.
    """
    host, _, port = (bound or cluster.coordinator).rpartition(":")
    found = resolved(host.strip("[]")) if bound else resolved(None, socket.AI_PASSIVE)
    if any(bind_error(address, int(port)) == errno.EADDRINUSE for address in found):
        fix = "end it, or use another --cluster.coordinator HOST:PORT in all processes"
        told = f"{cluster}: another program on this host uses port {port}. Fix: {fix}"
        raise PortTaken(told)


#: Names an interface to listen on, as for PyTorch.
INTERFACE = "GLOO_SOCKET_IFNAME"


def listen_where_peers_connect(
    cluster: ProcessPlace, exchange: Callable[[str], list[str]]
) -> str | None:
    """Make Gloo listen on the interface by which this host reaches the coordinator.

    Called once connected, and before JAX's backends start. `GLOO_SOCKET_IFNAME` names another
    interface.

    Args:     exchange: tells all processes a text, and returns the texts of all.
    Returns:  the address or interface; None if there is no route, which leaves JAX's choice.
    """
    own = address_towards(cluster.host)
    peers = [address for address in exchange(own or "") if address]
    if own and is_loopback(own) and not is_loopback(cluster.host):
        others = [address for address in peers if not is_loopback(address)]
        # The coordinator's name is this host's own: the way to a peer is the one peers come by.
        own = next(filter(None, map(address_towards, others)), own)
    if interface := os.environ.get(INTERFACE):
        _register(interface=interface)
        return interface
    if own:
        _register(hostname=own)
    return own


def _register(**where: str) -> None:
    """Replace JAX's CPU backend by one whose Gloo listens there. JAX passes neither argument."""

    def make_client():
        client = DISTRIBUTED.load().global_state.client
        gloo = GLOO.load().make_gloo_tcp_collectives(distributed_client=client, **where)
        return CPU_CLIENT.load().make_cpu_client(gloo)

    backend.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


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
    listen_where_peers_connect(cluster, lambda own: exchange("gloo", own, seconds))
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
