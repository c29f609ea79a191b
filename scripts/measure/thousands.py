"""Measure what grows with processes and devices: python scripts/measure/thousands.py WHAT [options]

    exchange --processes 8 64 512
    start CONFIG --devices 8 64 512 4096 [--section.field V ...]    # V may be DEVICES or PROCESSES
    locks --contenders 8 64 512

exchange: so many clients of one coordinator, in threads of this process, exchange texts, compare a
value and ask a question. start: what one process of a run does before XLA compiles, on a mesh of
CPU devices of which it has eight. The other processes are clients that only publish their devices.
locks: so many threads want the lock of one run folder at once.
"""

import argparse
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from jaxpar.config.command_line import parse_overrides
from jaxpar.config.config_file import load_config
from jaxpar.config.validate import resolve
from jaxpar.data.loader import open_loader
from jaxpar.parallel.context import order_of
from jaxpar.runtime.processes import peers
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.identity import identity
from jaxpar.step.state import abstract_logical, abstract_state, state_shardings
from jaxpar.step.train_step import make_train_step

#: Devices of a process.
LOCAL = 8

#: Seconds to wait for anything.
PATIENCE = 300

#: Where the processes of a CPU run publish their devices.
TOPOLOGY = "cpu:local_topology/cpu"


#: Services and clients live until the program ends: a client aborts it when its service ends.
KEPT: list[Any] = []


def coordinator(processes: int) -> str:
    """Start JAX's coordination service for so many processes. Returns its address."""
    from jax._src.lib import _jax

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(
        address, processes, heartbeat_timeout=PATIENCE, shutdown_timeout=5
    )
    KEPT.append(service)
    return address


def client_of(address: str, rank: int) -> Any:
    """Make the client of one process, which is not connected yet."""
    from jax._src.lib import _jax

    client = _jax.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=PATIENCE,
        use_compression=True,
        heartbeat_timeout=PATIENCE,
        shutdown_on_destruction=False,
    )
    KEPT.append(client)
    return client


def in_threads(work: Callable[[int], Any], ranks: range | list[int]) -> tuple[float, float]:
    """Call `work` with each rank, each in a thread. Returns seconds, and CPU seconds."""
    failures: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    began, used = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.perf_counter() - began, time.process_time() - used


# -------------------------------------------------------------------------------------- exchange


def measure_exchange(processes: int) -> dict[str, tuple[float, float]]:
    """Return the seconds, and CPU seconds of all, of each kind of exchange."""
    address = coordinator(processes)
    clients = [client_of(address, rank) for rank in range(processes)]
    here = threading.local()

    def as_rank(work: Callable[[int], Any]) -> Callable[[int], Any]:
        def run(rank: int) -> Any:
            here.state = SimpleNamespace(
                client=clients[rank], process_id=rank, num_processes=processes
            )
            return work(rank)

        return run

    kinds: dict[str, Callable[[int], Any]] = {
        "connect": lambda rank: clients[rank].connect(),
        "exchange": lambda rank: peers.exchange("texts", "0" * 64, PATIENCE),
        "check_same": lambda rank: peers.check_same("value", lambda: "same", PATIENCE),
        "any_process": lambda rank: peers.any_process(False),
    }
    with (
        mock.patch.object(peers, "_state", lambda: here.state),
        mock.patch.object(peers, "_questions", _Same()),
    ):
        found = {name: in_threads(as_rank(work), range(processes)) for name, work in kinds.items()}
    return found


class _Same:
    """A count that is the same in all threads, which ask one question."""

    def __next__(self) -> int:
        return 0


# ----------------------------------------------------------------------------------------- start


def publish_others(address: str, processes: int, real: list[int]) -> None:
    """Connect all processes but the real ones, and publish devices for them."""
    clients = {rank: client_of(address, rank) for rank in range(processes) if rank not in real}
    if not clients:
        return
    in_threads(lambda rank: clients[rank].connect(), [*clients])
    one = next(iter(clients.values()))
    example = one.blocking_key_value_get_bytes(f"{TOPOLOGY}/{real[-1]}", 1000 * PATIENCE)
    for rank, client in clients.items():
        client.key_value_set_bytes(f"{TOPOLOGY}/{rank}", of_rank(example, rank))


def of_rank(message: bytes, rank: int) -> bytes:
    """Return a process's message about its devices as that of another process on its own host.

    It is a protocol buffer: 1 rank, 2 id of the host's boot, 3 devices, of which 4 is the id, a
    multiple of the rank and the number of the device.
    """
    about = fields_of(message)
    own = next(value for tag, value in about if tag == 1)
    devices = [fields_of(value) for tag, value in about if tag == 3]
    between = next(value for tag, value in devices[0] if tag == 4) // own
    moved = [
        [(tag, value + (rank - own) * between if tag == 4 else value) for tag, value in device]
        for device in devices
    ]
    boot = f"{rank:036x}".encode()
    return encoded([(1, rank), (2, boot), *((3, encoded(device)) for device in moved)])


def fields_of(message: bytes) -> list[tuple[int, Any]]:
    """Parse a protocol buffer of integers and strings: (number of the field, value) of each."""
    found: list[tuple[int, Any]] = []
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = message[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while at < len(message):
        tag, kind = divmod(varint(), 8)
        value: Any = varint()
        if kind == 2:
            value, at = message[at : at + value], at + value
        elif kind:
            raise ValueError(f"field {tag} has the unknown kind {kind}")
        found.append((tag, value))
    return found


def encoded(fields: list[tuple[int, Any]]) -> bytes:
    """Encode what `fields_of` returns."""
    made = bytearray()

    def varint(number: int) -> None:
        while number >= 0x80:
            made.append(number & 0x7F | 0x80)
            number >>= 7
        made.append(number)

    for tag, value in fields:
        is_text = isinstance(value, bytes)
        varint(tag * 8 + 2 * is_text)
        varint(len(value) if is_text else value)
        made.extend(value if is_text else b"")
    return bytes(made)


def measure_start(config: str, devices: int, overrides: list[str]) -> list[str]:
    """Return what the first and the last process of a run report about their start."""
    processes = max(devices // LOCAL, 1)
    ranks = sorted({0, processes - 1})
    address = coordinator(processes)
    program = [sys.executable, __file__, "rank", config, address, str(processes)]
    words = [
        word.replace("DEVICES", f"{devices}").replace("PROCESSES", f"{processes}")
        for word in overrides
    ]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen([*program, str(rank), *words], env=env, stdout=-1, text=True)
        for rank in ranks
    ]
    publish_others(address, processes, ranks)
    said = [process.communicate(timeout=PATIENCE)[0].strip() for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("a process failed: its error is above")
    return said


def start_as(config: str, address: str, processes: int, rank: int, overrides: list[str]) -> None:
    """Do what a process does before XLA compiles, and print CPU seconds and calls of Python."""
    import jax

    jax.config.update("jax_num_cpu_devices", LOCAL)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    from jax._src import distributed

    client, state = client_of(address, rank), distributed.global_state
    client.connect()
    state.client, state.process_id, state.num_processes = client, rank, processes
    parts: list[str] = []
    calls, used = 0, time.process_time()

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    def ended(name: str) -> None:
        nonlocal calls, used
        sys.setprofile(None)
        parts.append(f"{name} {time.process_time() - used:.3f} s {calls:,}")
        calls, used = 0, time.process_time()
        sys.setprofile(count)

    sys.setprofile(count)
    devices = jax.devices()
    ended("devices")
    cfg = resolve(parse_overrides(load_config(config), overrides), len(devices))
    ended("config")
    mesh = make_mesh(cfg.parallel)
    ended("mesh")
    loader = open_loader(cfg, mesh, "train", lambda length: order_of(cfg, length))
    loader.batch(0)
    ended("loader, batch")
    to = state_shardings(cfg, mesh)
    place = lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)  # noqa: E731
    abstract = jax.tree.map(place, abstract_state(cfg), to)
    ended("state")
    for leaf in jax.tree.leaves(abstract_logical(cfg, mesh)):
        leaf.sharding.addressable_devices_indices_map(leaf.shape)
    ended("checkpoint layout")
    step: Any = make_train_step(cfg, mesh, loader.max_documents)
    lowered = step.lower(abstract, loader.abstract_batch())
    ended("lowering")
    content = identity(lowered)
    ended("identity")
    sys.setprofile(None)
    name = hashlib.sha256(content).hexdigest()[:12]
    print(f"{len(devices)} devices, process {jax.process_index()}: program {name}; {parts}")
    sys.stdout.flush()
    os._exit(0)


# ----------------------------------------------------------------------------------------- locks


def measure_locks(contenders: int) -> dict[str, Any]:
    """Return how long contenders wait for the lock of a run folder, and how many get it."""
    from jaxpar.runtime.files.lock import RunLock, RunLocked

    won, refused = [], []
    with tempfile.TemporaryDirectory() as name:

        def one(rank: int) -> None:
            try:
                won.append(RunLock(Path(name), 0.0, lambda text: None))
            except RunLocked:
                refused.append(rank)

        seconds, used = in_threads(one, range(contenders))
        for lock in won:
            lock.release()
    return {"won": len(won), "refused": len(refused), "seconds": seconds, "CPU seconds": used}


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["rank"]:
        config, address, processes, rank, *overrides = sys.argv[2:]
        return start_as(config, address, int(processes), int(rank), overrides)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["exchange", "start", "locks"])
    parser.add_argument("config", nargs="?", default="quickstart")
    parser.add_argument("--processes", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--contenders", type=int, nargs="+", default=[8, 64, 512])
    options, overrides = parser.parse_known_args()
    threading.stack_size(256 << 10)
    if options.what == "exchange":
        for n in options.processes:
            found = measure_exchange(n).items()
            parts = (f"{name} {wall:.3f} s, CPU {used:.3f} s" for name, (wall, used) in found)
            print(f"{n} processes: {'; '.join(parts)}", flush=True)
    elif options.what == "locks":
        for n in options.contenders:
            print(f"{n} contenders: {measure_locks(n)}", flush=True)
    else:
        for n in options.devices:
            print("\n".join(measure_start(options.config, n, overrides)), flush=True)
    os._exit(0)  # clients would wait for one another


if __name__ == "__main__":
    main()
