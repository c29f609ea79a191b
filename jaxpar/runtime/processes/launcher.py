"""Launches the processes of a run on this host, alone or with the launchers of other hosts.

Launchers of several hosts meet at a rendezvous, which one of them serves.
"""

import contextlib
import signal
import socket
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxpar.config import Config, ConfigError
from jaxpar.config.command_line import ConfigArguments, expand_set_options
from jaxpar.runtime import exit_codes
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.gpus import visible
from jaxpar.runtime.processes import children, launch_options, mtls
from jaxpar.runtime.processes.addresses import is_here, is_loopback, joined, resolved
from jaxpar.runtime.processes.children import POLL_SECONDS
from jaxpar.runtime.processes.hosts.agent import Agent, report
from jaxpar.runtime.processes.hosts.generations import Rules
from jaxpar.runtime.processes.hosts.kv_store import LocalStore, Service, SharedStore, Store
from jaxpar.runtime.processes.hosts.membership import Membership
from jaxpar.runtime.processes.hosts.service import PORT_TAKEN
from jaxpar.runtime.processes.hosts.trainers import CopiesInMemory, Program
from jaxpar.runtime.processes.launch_options import LaunchOptions, ServeOptions
from jaxpar.runtime.processes.token import TOKEN_FILE, RunToken, given_token, token_of

#: The fields that differ between the processes.
SET_HERE = [f"--cluster.{x}" for x in ("coordinator", "num-processes", "process-id", "detect")]


def arguments_of(config: ConfigArguments) -> list[str]:
    """Return the arguments of the processes, `jaxpar.train`.

    Raises:   ConfigError for a field that the launcher sets.
    """
    words = list(expand_set_options(config.overrides))
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, given, text = word.partition("=")
        name = name.replace("_", "-")
        if name in SET_HERE:
            path, value = name.removeprefix("--").replace("-", "_"), text if given else following
            raise ConfigError(path, value, "is set by the launcher", "remove it")
    return [config.name, *config.overrides]


def shares_of_gpus(count: int) -> list[dict[str, str]]:
    """Return the environment that assigns GPUs to each process; empty if there are none.

    Raises:   ConfigError if they cannot be shared evenly.
    """
    if not visible.gpu_is_present():
        return []
    ids, name = visible.visible_gpu_ids(), "CUDA_VISIBLE_DEVICES"
    seen = len(ids)
    if seen % count or not seen:
        rule = f"{seen} GPUs cannot be shared evenly by {count} processes"
        fix = "use another -n, or --run.cpu-devices 1 for simulated devices"
        raise ConfigError("-n", count, rule, fix)
    each = seen // count
    return [{name: ",".join(ids[i * each : (i + 1) * each])} for i in range(count)]


def run(
    asked: LaunchOptions,
    args: list[str],
    cfg: Config,
    memory: CopiesInMemory | None,
) -> int:
    """Train on this host, with the launchers of others if `--nodes` says so.

    Args:     args, cfg: of the run. memory: where its processes keep copies of the state; None:
              nowhere.
    Returns:  the run's exit code.
    Raises:   ConfigError for GPUs that cannot be shared, addresses that the others cannot use, and
              a token that is missing or cannot be read.
    """
    count = asked.num_processes
    gpus = shares_of_gpus(count) if not cfg.run.cpu_devices else []
    devices = cfg.run.cpu_devices * count or (len(visible.visible_gpu_ids()) if gpus else count)
    program = Program(
        command=[sys.executable, "-u", "-m", "jaxpar.train", *args],
        run_dir=Path(cfg.run.dir),
        gpus=gpus,
        grace=asked.grace,
    )
    stopped: list[signal.Signals] = []
    children.on_signals(stopped.append)
    own: dict[str, Any] = {"name": asked.host_name or socket.gethostname(), "devices": devices}
    own |= {"processes": count, "address": "127.0.0.1"}
    rules, service = Rules(restarts=asked.restarts), None
    store: Store = LocalStore({})
    with contextlib.ExitStack() as until_the_end:
        if asked.nodes:
            token = token_for_hosts(cfg)
            mtls.arguments()  # as the coordinator of a generation has them, in a process of its own
            least, most = launch_options.limits(asked.nodes)
            rules = Rules(
                least=least,
                most=most,
                restarts=asked.restarts,
                obstacle=lambda devices: launch_options.obstacle(cfg, devices),
            )
            service = served_here(asked.rendezvous)
            if service is not None:
                until_the_end.callback(service.end)
            own["address"] = _address(asked, stopped)
            if memory is not None:
                own["piece_port"] = until_the_end.enter_context(memory.serve(own["address"], token))
            run_name = cfg.run.store or str(cfg.run.dir)  # beside a store, folders may be elsewhere
            store = SharedStore(asked.rendezvous, run_name, token, asked.heartbeat_seconds)
        here = Membership(store, own, asked.heartbeat_seconds)
        until_the_end.callback(here.close)
        agent = Agent(asked, rules, program, here, memory)
        children.on_signals(agent.stop)
        if stopped:
            agent.stop(stopped[0])
        code = agent.run()
        if service is not None:
            linger(here, 2 * asked.heartbeat_seconds)
        return code


def token_for_hosts(cfg: Config) -> RunToken:
    """Return the token by which the hosts of a run recognize one another. Raises: ConfigError."""
    if cfg.run.store and given_token() is None:
        rule = "is needed with --nodes and run.store: the hosts need share no folder to find it in"
        fix = "put the same secret on every host, and set it to the file's path"
        raise ConfigError(TOKEN_FILE, "", rule, fix)
    return token_of(Path(cfg.run.dir))


def _address(asked: LaunchOptions, stopped: Collection[signal.Signals]) -> str:
    """Return this host's address, once the rendezvous has one: names of new pods come late.

    Raises:   RunError after --wait-seconds.
    """
    until, told = time.monotonic() + asked.wait_seconds, False
    while not (own := launch_options.own_address(asked)):
        host, _ = launch_options.checked_address("--rendezvous", asked.rendezvous)
        if not told:
            report(f"the rendezvous {host} has no address that this host can reach; waiting")
            told = True
        if stopped or time.monotonic() > until:
            limit = f"{asked.wait_seconds:g} s, --wait-seconds"
            raise RunError(f"the rendezvous {host} is unknown or out of reach, after {limit}")
        time.sleep(POLL_SECONDS)
    return own


def serve(asked: ServeOptions) -> int:
    """Serve the rendezvous until a signal.

    Raises:   ConfigError if the address is none of this host; RunError if its port is taken.
    """
    stopped: list[signal.Signals] = []
    children.on_signals(stopped.append)
    host, port = launch_options.checked_address("--serve-rendezvous", asked.address)
    bound = _bound(host)
    if bound is None:
        rule, fix = "is not this host", "use one of its names or addresses"
        raise ConfigError("--serve-rendezvous", asked.address, rule, fix)
    service = Service(joined(bound, port))
    if not service.wait_until_serving():
        raise RunError(f"--serve-rendezvous {asked.address}: port {port} is in use")
    report(f"serving the rendezvous {asked.address}, on {service.address}")
    while not stopped:
        if service.ended() is not None:
            raise RunError(f"the rendezvous {asked.address} has ended")
        time.sleep(POLL_SECONDS)
    service.end()
    return report(f"stopped by {stopped[0].name}", exit_codes.EXIT_OK)


def served_here(rendezvous: str) -> Service | None:
    """Serve the rendezvous if HOST is this host, and nobody serves it here yet."""
    host, port = launch_options.checked_address("--rendezvous", rendezvous)
    bound = _bound(host)
    if bound is None:
        return None
    service = Service(joined(bound, port))
    if service.wait_until_serving():
        report(f"serving the rendezvous on {service.address}")
        return service
    if service.ended() != PORT_TAKEN:
        raise RunError(f"cannot serve the rendezvous on {service.address}")
    return None


def _bound(host: str) -> str | None:
    """Return the address of this host to listen on; None if `host` is another one."""
    here = [one for one in resolved(host) if is_here(one)]
    if not here:
        return None
    seen = [one for one in here if not is_loopback(one)]
    if seen or is_loopback(host):
        return (seen or here)[0]
    return "0.0.0.0"  # a name that is 127.0.1.1 here, as on Debian, and another address elsewhere


def linger(membership: Membership, seconds: float) -> None:
    """Serve on until the others have read how the run ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        seen = membership.turn()
        if seen is not None:
            others = seen.alive - {membership.own.name}
            if all(seen.hosts[name].left for name in others):
                return
        time.sleep(POLL_SECONDS)
