"""Kill a process of a data-parallel job whose others continue in place: `live_devices`.

    python scripts/measure/live_devices.py --processes 4 --kill 22 --back 8      # a GPU each
    python scripts/measure/live_devices.py --processes 4 --kill 0 --plain        # without the flags
    python scripts/measure/live_devices.py --processes 3 --cpu    # gloo, which may abort a survivor

Starts the processes on this host, kills the last one after some seconds, and starts it again. The
others lose the step in which it died, agree on a mesh without it, and take it in again when it is
back. Prints the seconds of each part, and the milliseconds of a step.

Source: JAX's page on fault tolerance (docs.jax.dev/en/latest/fault_tolerance.html) for flags.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import live_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec

#: What JAX asks for, so that collectives with a dead participant end, and the process does not.
FLAGS = (
    "--xla_gpu_nccl_terminate_on_error=false --xla_gpu_nccl_async_execution=true "
    "--xla_gpu_nccl_blocking_communicators=false"
)
VARIABLES = {
    "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE": "1",
    "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1",
}
#: On CPUs, survivors of a ring wait for each other for ever without a limit for collectives.
CPU_FLAGS = "--xla_cpu_collective_timeout_seconds=4"
LAYERS, HEARTBEAT, BETWEEN_LINES = 4, 5, 200


def environment(rank: int, options: argparse.Namespace) -> dict[str, str]:
    """Return the variables of a process."""
    mine = os.environ | {"LIVE_BEGAN": str(options.began), "LIVE_PORT": str(options.port)}
    if options.cpu:
        return mine | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": CPU_FLAGS}
    mine |= {"CUDA_VISIBLE_DEVICES": str(rank), "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}
    return mine if options.plain else mine | VARIABLES | {"XLA_FLAGS": FLAGS}


def drive(options: argparse.Namespace) -> None:
    """Start the processes, kill one, start it again, and wait for all."""

    def start(rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank)]
        return subprocess.Popen(command, env=environment(rank, options))

    running = [start(rank) for rank in range(options.processes)]
    if options.kill:
        time.sleep(options.kill)
        running[-1].send_signal(signal.SIGKILL)
        print(f"{time.time() - options.began:7.2f} killed the last one", flush=True)
        time.sleep(options.back)
        running[-1] = start(options.processes - 1)
    end = options.began + options.seconds + 30
    for process in running:
        try:
            process.wait(max(end - time.time(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
    print("exit codes", [process.wait() for process in running], flush=True)


class Job:
    """A process of the job: weights, and a compiled step for the devices that live."""

    def __init__(self, rank: int, options: argparse.Namespace):
        self._rank, self._cpu = rank, options.cpu
        self._width, self._rows = (256, 64) if options.cpu else (8192, 4096)
        values = np.random.default_rng(0).normal(size=(LAYERS, self._width, self._width))
        self._first = (values / self._width**0.5).astype(jnp.bfloat16)
        self.done, self.devices, self._last = 0, None, time.time()
        self._milliseconds: list[float] = []

    def say(self, text: str) -> None:
        """Print a line with the seconds since the job began."""
        began = float(os.environ["LIVE_BEGAN"])
        print(f"{time.time() - began:7.2f} process {self._rank} {text}", flush=True)

    def form(self, devices: list[jax.Device]) -> None:
        """Agree on the steps that are done, and compile the step for some devices."""
        began = time.time()
        if self._cpu:  # gloo never frees the keys of a group: another order is another group
            turn = int(began / 30) % len(devices)
            devices = devices[turn:] + devices[:turn]
        self._mesh = Mesh(np.array(devices), ("data",))
        self._mine = [d for d in devices if d.process_index == self._rank]
        steps = self._jit(lambda a: jax.lax.pmax(a[0], "data"), (PartitionSpec("data"),))(
            self._split(np.full(1, self.done, np.int32))
        )
        self.done = int(steps.addressable_data(0))
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        parts = [jax.device_put(self._first, d) for d in self._mine]
        self._weights = jax.make_array_from_single_device_arrays(
            self._first.shape, everywhere, parts
        )
        rows = np.random.default_rng(self._rank).normal(size=(self._rows, self._width))
        self._batch = self._split(rows.astype(jnp.bfloat16))
        self._step = self._jit(self._train, (PartitionSpec(), PartitionSpec("data")))
        agreed = time.time()
        jax.block_until_ready(self._step(self._weights, self._batch))
        now = time.time()
        self.say(
            f"{len(devices)} devices at step {self.done}: {now - self._last:.2f} s since the last "
            f"step; to agree {agreed - began:.2f} s, first step {now - agreed:.2f} s"
        )

    def step(self) -> None:
        """Take a step."""
        began = time.time()
        self._weights, loss = jax.block_until_ready(self._step(self._weights, self._batch))
        self._milliseconds.append(1e3 * (time.time() - began))
        if not np.isfinite(float(loss.addressable_data(0))):
            raise FloatingPointError("the loss is not finite")

    def finished(self) -> None:
        """Count a step that all devices finished."""
        self.done += 1
        self._last = time.time()
        if self.done % BETWEEN_LINES == 0:
            self.say(f"step {self.done}: {self.median():.2f} ms")

    def median(self) -> float:
        """Return the milliseconds of recent steps."""
        return float(np.median(self._milliseconds[-BETWEEN_LINES:]))

    def _train(self, weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(weights: jax.Array) -> jax.Array:
            hidden = x
            for layer in weights:
                hidden = jnp.tanh(hidden @ layer)
            return jnp.mean(jnp.square(hidden.astype(jnp.float32)))

        value, grad = jax.value_and_grad(loss)(weights)
        n = jax.lax.axis_size("data")
        new = weights - 0.01 * jax.lax.psum(grad, "data") / n
        return new.astype(weights.dtype), jax.lax.psum(value, "data") / n

    def _jit(self, function: Any, specs: tuple[PartitionSpec, ...]) -> Any:
        outs: Any = PartitionSpec() if len(specs) == 1 else (PartitionSpec(), PartitionSpec())
        return jax.jit(
            jax.shard_map(
                function, mesh=self._mesh, in_specs=specs, out_specs=outs, check_vma=False
            )
        )

    def _split(self, part: np.ndarray) -> jax.Array:
        to = NamedSharding(self._mesh, PartitionSpec("data"))
        shape = (self._mesh.size * part.shape[0], *part.shape[1:])
        parts = [jax.device_put(part, d) for d in self._mine]
        return jax.make_array_from_single_device_arrays(shape, to, parts)


def work(rank: int, options: argparse.Namespace) -> None:
    """Train until the time is up, on whichever devices live."""
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        f"127.0.0.1:{os.environ['LIVE_PORT']}",
        options.processes,
        rank,
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=HEARTBEAT,
        cluster_detection_method="deactivate",
    )
    job = Job(rank, options)
    while time.time() < float(os.environ["LIVE_BEGAN"]) + options.seconds:
        try:
            with live_devices(jax.devices()) as devices:
                if devices != job.devices:
                    job.form(devices)
                    job.devices = devices
                job.step()
        except Exception as error:  # of whatever type the runtime gives a lost peer
            job.say(f"lost a step: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            job.devices = None
            time.sleep(0.5)
            continue
        job.finished()
    job.say(f"ends at step {job.done}: {job.median():.2f} ms")
    os._exit(0)  # the barrier at the end would wait for those that died


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--processes", type=int, default=4, help="one GPU each (%(default)s)")
    add("--seconds", type=float, default=50, help="length of the job (%(default)s)")
    add("--kill", type=float, default=22, help="seconds until the last is killed; 0: never")
    add("--back", type=float, default=8, help="seconds until it is started again (%(default)s)")
    add("--plain", action="store_true", help="without the flags for GPUs, to compare step times")
    add("--cpu", action="store_true", help="on CPUs, with gloo")
    add("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options.rank, options)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        options.port = free.getsockname()[1]
    options.began = time.time()
    drive(options)


if __name__ == "__main__":
    main()
