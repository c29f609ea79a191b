"""Prepares a program for JAX, and joins the other processes of its run, if there are any.

The place of a process in its run is detected from flags or environment variables, without JAX.

Each launcher sets its own variables (`sources.py`). A complete set of variables wins over those
that are incomplete; complete sets that contradict each other are an error.

JAX detects clusters too, but within `jax.distributed.initialize`, which takes the port and returns
nothing. The place must be known before: GPUs, CPUs, XLA's flags and the address to listen on depend
on it. What JAX 0.11.2 detects does not suffice either: it gives each task of Slurm and Open MPI the
one GPU of its local rank, also where `--gpus-per-task` shows it a single one, numbered 0; it takes
the port from the job, which two steps share; Open MPI 5 needs mpi4py, and Kubernetes needs its
client and the right to read pods. It does not know torchrun, Hydra, jsrun and Flux. Tests compare
the places with JAX's where JAX has them.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable

from jaxpar.config import ClusterConfig, Config, ConfigError, flag, replace
from jaxpar.runtime import start as runtime
from jaxpar.runtime.gpus.numa import bind_process
from jaxpar.runtime.processes.addresses import is_loopback, split
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.processes.sources import (
    SOURCES,
    Environment,
    NotANumber,
    ProcessPlace,
    launched,
)


def detect(cfg: Config, env: Environment) -> ProcessPlace | None:
    """Return this process's place in its run; None for a run of one process.

    Args:     cfg: its section `cluster` is used. env: `os.environ`.
    Raises:   ConfigError for variables or flags that are incomplete, malformed or contradictory,
              and for a loopback coordinator of processes on several hosts.
    """
    c = cfg.cluster
    env = {name: value for name, value in env.items() if value}  # empty variables count as not set
    if (c.num_processes == 0) != (c.process_id == -1):
        missing = "cluster.process_id" if c.process_id == -1 else "cluster.num_processes"
        rule = "must be set together with the other: num_processes and process_id"
        fix = f"set it to 0, 1, ... in each process: {flag('cluster.process_id', 0)}"
        raise ConfigError(missing, getattr(c, missing.split(".")[1]), rule, fix)
    if c.num_processes:
        if not c.coordinator:
            fix = f"use process 0's host and a free port: {flag('cluster.coordinator')} host:1234"
            raise ConfigError("cluster.coordinator", "", "is needed with num_processes", fix)
        found: ProcessPlace | None = _from_flags(cfg, env)
    else:
        found = _from_environment(c.detect, env)
        if found is not None and c.coordinator:
            found = dataclasses.replace(found, coordinator=c.coordinator)
    if found is None or found.num_processes == 1:
        return None
    _check(found)
    return found


def _from_flags(cfg: Config, env: Environment) -> ProcessPlace:
    """Return the place that flags name. Which GPUs belong to the process, its launcher knows."""
    c = cfg.cluster
    place = ProcessPlace(
        source="flags",
        coordinator=c.coordinator,
        num_processes=c.num_processes,
        process_id=c.process_id,
    )
    with contextlib.suppress(ConfigError):
        there = _from_environment(c.detect, env)
        if there is not None and _same(there, place):
            return _with_share_of(place, [there])
    return place


def _from_environment(wanted: str, env: Environment) -> ProcessPlace | None:
    place = launched(env)  # the launcher may be a task of any other
    if place is not None or wanted == "none":
        return place
    found: list[ProcessPlace] = []
    failed: dict[str, ConfigError] = {}
    for name in SOURCES if wanted == "auto" else [wanted]:
        try:
            place = SOURCES[name](env)
        except ConfigError as error:
            if isinstance(error, NotANumber) and not found:
                raise  # an outer launcher's place would be that of several processes
            failed[name] = error
            continue
        found += [place] if place is not None else []
    if not found:
        if failed:
            raise next(iter(failed.values()))
        if wanted != "auto":
            rule = "is selected, but its variables are not set"
            fix = f"use {flag('cluster.detect', 'auto')}"
            raise ConfigError("cluster.detect", wanted, rule, fix)
        return None
    found = [p for p in found if not any(_runs_within(inner, p) for inner in found)]
    for other in found[1:]:
        if not _same(other, found[0]):
            told = f"{found[0]}; {other}"
            kinds = {"kubernetes": "jax"}  # as the option names it
            source = kinds.get(other.source, other.source)
            fix = f"select the right one: {flag('cluster.detect', source)}"
            raise ConfigError("environment", told, "contradicts itself", fix)
    # A launcher within another one leaves the outer one's variables incomplete: no news.
    by_hand = [error for name, error in failed.items() if name in ("jax", "torch")]
    passed_over = "; ".join(f"{error.field} {error.rule}" for error in by_hand)
    return dataclasses.replace(_with_share_of(found[0], found), passed_over=passed_over)


def _same(one: ProcessPlace, other: ProcessPlace) -> bool:
    return (one.num_processes, one.process_id) == (other.num_processes, other.process_id)


def _runs_within(inner: ProcessPlace, outer: ProcessPlace) -> bool:
    """Return whether a task of one launcher started the other, so that it describes no process.

    A single task may start whatever it likes. mpirun starts its daemons as tasks of srun, and srun
    may start torchrun on each host. An inner run of one process in each of several tasks is a
    contradiction: these would all train the same run.
    """
    if inner.num_processes == 1 or not outer.started:
        return False
    order = ["jax", "kubernetes", "jaxjob", "torch", "mpi", "flux", "slurm"]
    if order.index(inner.source) >= order.index(outer.source):
        return False
    by_host = inner.source == "torch" and inner.local_processes > 1
    by_host &= inner.num_processes == inner.local_processes * outer.num_processes
    return outer.num_processes == 1 or inner.started or by_host


def _with_share_of(place: ProcessPlace, agreeing: list[ProcessPlace]) -> ProcessPlace:
    """Return the place with the share of GPUs that one of several agreeing sources knows."""
    known = [p for p in agreeing if p.bound] or sorted(agreeing, key=lambda p: -p.local_processes)
    share = ("bound", "local_processes", "local_id")
    return dataclasses.replace(place, **{name: getattr(known[0], name) for name in share})


def _check(c: ProcessPlace) -> None:
    """Raise ConfigError for an invalid place or address."""
    if not 0 <= c.process_id < c.num_processes:
        rule = f"process {c.process_id} is not one of {c.num_processes}, counted from 0"
        raise ConfigError("cluster.process_id", c.process_id, rule, "number them from 0")
    if not c.coordinator:
        told = f"{c.num_processes} processes on {c.num_hosts} hosts"
        rule = "does not name the host of mpirun" if c.source == "mpi" else "does not name a host"
        fix = f"set process 0's host: {flag('cluster.coordinator')} HOST:1234"
        raise ConfigError("environment", f"{c.source}: {told}", rule, fix)
    host, _, port = c.coordinator.rpartition(":")
    if split(c.coordinator) is None:
        bare = ":" in host and split(f"{host}:1") is None  # on which JAX would crash
        rule = "is not host:port" + "; an IPv6 address needs brackets" * bare
        like = f"[{host.strip('[]')}]:{port}" if bare else f"{host or c.coordinator}:1234"
        fix = f"use {flag('cluster.coordinator', like)}"
        raise ConfigError("cluster.coordinator", c.coordinator, rule, fix)
    if (c.num_hosts or 1) > 1 and is_loopback(c.host):
        rule = f"is a loopback address, but the processes are on {c.num_hosts} hosts"
        fix = f"use a name of process 0's host that all can resolve: {flag('cluster.coordinator')}"
        raise ConfigError("cluster.coordinator", c.coordinator, rule, fix + f" HOST:{port}")


def join(cfg: Config, report: Callable[[str], None] | None = None) -> tuple[Config, list[str]]:
    """Prepare this process for JAX, and connect it to the other processes of its run, if any.

    Programs call this first.

    Args:     report: called with a line about the peers, once all have joined. None: `log`.
    Returns:  the config without the fields that identify this process, since a run's identity does
              not depend on where its processes ran; and the settings that `runtime.start` returns.
    Raises:   ConfigError as `cluster.detect`, `connect` and `between_hosts`.
    """
    found = detect(cfg, os.environ)
    if found is None:
        return cfg, bind_process() + runtime.start(cfg)
    # Only several processes need what connects them.
    from jaxpar.runtime.processes.connecting import connect, local_gpus
    from jaxpar.runtime.processes.networks.choosing import between_hosts

    bound = bind_process(share=local_gpus(found))
    environment = runtime.start(cfg, found.num_processes)
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
