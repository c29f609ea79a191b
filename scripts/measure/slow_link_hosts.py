"""Time sums over a slow link between two hosts: sudo python scripts/measure/slow_link_hosts.py

Two network namespaces are hosts, with a process of two simulated CPU devices each, and a link of a
limited rate between them. For each rate, it times

    flat          an all-reduce of a gradient over all four devices
    hierarchical  a reduce-scatter inside each host, an all-reduce of the shards over the link, and
                  an all-gather inside each host
    float32, ...  the sum of the shards over the link alone, by each method

and prints what a host sends, how long that takes at the rate, and the median time. The link may
also lose packets and delay them. Needs root and iproute2 on Linux, and the tests' folder: run it in
a checkout.

    python scripts/measure/slow_link_hosts.py --rates 100mbit,1gbit --megabytes 16
    python scripts/measure/slow_link_hosts.py --rates 100mbit --megabytes 1 --loss 0.01 --delay 0.02
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests import ranks  # noqa: E402
from tests.e2e.hosts.network import Network  # noqa: E402

#: Devices of a host, columns of the matrix, and the share for top-k.
DEVICES, COLUMNS, RATIO = 2, 1024, 0.01

#: The line of a child that has its figures.
MARK = "figures: "

#: A child that takes longer hangs.
MAX_SECONDS = 240


def host_bytes(rows: int) -> dict[str, float]:
    """Return the bytes that a host sends over the link, by method. Args:     rows: of a matrix."""
    whole, shard = 4 * rows * COLUMNS, 4 * rows * COLUMNS / DEVICES
    devices = 2 * DEVICES
    return {
        "flat": 2 * (devices - 1) / devices * whole,  # a ring crosses the link once each way
        "hierarchical": DEVICES * shard,
        "float32": DEVICES * shard,
        "bfloat16": DEVICES * shard / 2,
        "int8": DEVICES * shard / 4 * (1 + 4 / 256),
        "top_k": DEVICES * shard / 4 * RATIO * 6,
    }


def child(where: str, rank: int, rows: int, repeats: int) -> None:
    """Time every sum in this process, one of two."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpar.config import Config, replace
    from jaxpar.parallel.replicas.reduction import sum_bfloat16, sum_int8
    from jaxpar.parallel.replicas.top_k import sum_top_k
    from jaxpar.runtime import start as runtime
    from jaxpar.runtime.processes import rendezvous
    from jaxpar.sharding.axes import DATA, REPLICA
    from jaxpar.sharding.mesh import make_mesh

    fields: dict[str, Any] = {"coordinator": where, "num_processes": 2, "process_id": rank}
    base = replace(Config(), **{f"cluster.{name}": value for name, value in fields.items()})
    base = replace(base, **{"run.cpu_devices": DEVICES, "parallel.replica": 2, "parallel.data": 2})
    cfg, _ = rendezvous.join(base)
    runtime.start(cfg)
    mesh = make_mesh(cfg.parallel)

    def hierarchical(x: Any) -> Any:
        shard = lax.psum_scatter(x, DATA, scatter_dimension=0, tiled=True)
        return lax.all_gather(lax.psum(shard, REPLICA), DATA, axis=0, tiled=True)

    sums: dict[str, tuple[Callable, int]] = {
        "flat": (lambda x: lax.psum(x, (REPLICA, DATA)), rows),
        "hierarchical": (hierarchical, rows),
        "float32": (lambda x: lax.psum(x, REPLICA), rows // DEVICES),
        "bfloat16": (sum_bfloat16, rows // DEVICES),
        "int8": (lambda x: sum_int8(x)[0], rows // DEVICES),
        "top_k": (lambda x: sum_top_k(x, RATIO)[0], rows // DEVICES),
    }
    figures = {}
    for name, (function, own_rows) in sums.items():
        x = jnp.ones((2, DEVICES, own_rows, COLUMNS), jnp.float32)
        place = NamedSharding(mesh, PartitionSpec(REPLICA, DATA))
        own = jax.jit(lambda x=x: x, out_shardings=place)()
        local = functools.partial(_scalar, function)
        every = PartitionSpec(mesh.axis_names)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=place.spec, out_specs=every)
        program = jax.jit(mapped)
        seconds = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            jax.block_until_ready(program(own))
            seconds.append(time.perf_counter() - began)
        figures[name] = statistics.median(seconds[1:])
    print(MARK + json.dumps(figures), flush=True)


def _scalar(function: Callable, x: Any) -> Any:
    """Sum an array of [1, 1, rows, columns], and return a number, so that no result is moved."""
    from jaxpar.parallel.collectives import varying

    return varying(function(varying(x[0, 0])).sum()[None])


def measure(
    rate: str, rows: int, repeats: int, loss: float = 0.0, delay: float = 0.0
) -> dict[str, float]:
    """Time the sums on two hosts with a link of a rate.

    Args:     loss: share of the packets that are lost, each way. delay: seconds, each way.
    """
    with Network(2) as network, tempfile.TemporaryDirectory() as folder:
        if loss:
            network.lose(1, loss)
        network.delay(1, delay)
        where = f"{network.addresses[0]}:{ranks.free_port()}"
        logs = [Path(folder) / f"host{i}.log" for i in range(2)]
        processes = []
        for i, log in enumerate(logs):
            network.limit(i, rate)
            command = [sys.executable, __file__, "--child", where, "--rank", str(i)]
            command += ["--rows", str(rows), "--repeats", str(repeats)]
            with open(log, "w") as out:
                processes.append(network.start(i, command, ranks.environment(), out))
        try:
            for process in processes:
                process.wait(MAX_SECONDS)
        finally:
            for process in processes:
                process.kill()
        said = logs[0].read_text()
        found = [line for line in said.splitlines() if line.startswith(MARK)]
        if not found:
            raise SystemExit(said)
        return json.loads(found[0].removeprefix(MARK))


def bits(rate: str) -> float:
    """Return the bits per second of "100mbit" or "1gbit"."""
    return float(rate[:-4]) * {"mbit": 1e6, "gbit": 1e9}[rate[-4:]]


def main() -> None:
    """Measure each rate, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rates", default="100mbit,1gbit", help="of the link, separated by commas (%(default)s)")
    add("--megabytes", type=int, default=16, help="of the gradient, float32 (%(default)s)")
    add("--repeats", type=int, default=5, help="timed sums of each (%(default)s)")
    add("--loss", type=float, default=0, help="share of packets that are lost (%(default)s)")
    add("--delay", type=float, default=0, help="seconds that a packet takes longer (%(default)s)")
    add("--child", help=argparse.SUPPRESS)
    add("--rank", type=int, help=argparse.SUPPRESS)
    add("--rows", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.rank, options.rows, options.repeats)
        return
    rows = options.megabytes * 1_000_000 // (4 * COLUMNS * DEVICES) * DEVICES
    sent = host_bytes(rows)
    print("| rate | sum | MB that a host sends | s at this rate | s |\n|---|---|---|---|---|")
    for rate in options.rates.split(","):
        found = measure(rate, rows, options.repeats, options.loss, options.delay)
        for name, seconds in found.items():
            at_least = 8 * sent[name] / bits(rate)
            line = f"| {rate} | {name} | {sent[name] / 1e6:.3f} | {at_least:.3f} | {seconds:.3f} |"
            print(line, flush=True)


if __name__ == "__main__":
    main()
