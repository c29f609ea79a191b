"""What a run asks the planner at its start: whether it fits, its forecast, hints about sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.components.dims import dims_of, numbers, ways_of
from jaxpar.config import Config, ConfigError, flag
from jaxpar.config.layout.placement import spreads_experts
from jaxpar.config.lists.step_sizes import config_of, step_sizes
from jaxpar.kernels.platform import Platform
from jaxpar.model.flops import num_params
from jaxpar.prediction.hardware import GIB, NETWORKS, gpu_of_kind
from jaxpar.prediction.kernels import with_backend
from jaxpar.prediction.memory import MemoryForecast, memory_of
from jaxpar.runtime.host_memory import host_memory

# ---- Compares the predicted memory of a run with that of its devices, before anything is allocated
#
# A CPU's devices share the memory of their host. Linux ends a process that takes more, without a
# message, and often other programs first.


def check_fits(cfg: Config, processes: int = 1) -> str:
    """Check that a run fits in the memory of this process's devices.

    Args:     cfg: resolved. processes: of the run on this host.
    Returns:  a warning if a GPU's memory is less than predicted; otherwise an empty text.
    Raises:   ConfigError if devices are CPUs and their host has less memory than predicted.
    """
    device, count = jax.local_devices()[0], jax.local_device_count()
    if device.platform == "cpu":
        check_host(cfg, count * processes, host_memory())
        return ""
    there = (device.memory_stats() or {}).get("bytes_limit", 0)
    here = Platform.here()
    by_xla = not here.runs_elementwise_kernels
    needed = memory_of(with_backend(cfg, here), softmax_by_xla=by_xla).total
    if not there or needed <= there:
        return ""
    return (
        f"a step is predicted to need {needed / GIB:.1f} GiB, but a device ({device.device_kind}) "
        f"has {there / GIB:.1f} GiB; python -m jaxpar.plan shows layouts that fit"
    )


def check_host(cfg: Config, devices: int, there: int) -> None:
    """Check that simulated devices fit in their host's memory.

    Args:     cfg: resolved. devices: on this host. there: bytes of memory.
    Raises:   ConfigError with the parts of the prediction.
    """
    memory = memory_of(cfg, on_reference=True)
    needed = devices * memory.total
    if needed <= there:
        return
    rule = f"needs {needed / GIB:,.1f} GiB of memory for {_count(devices)} ({_parts(memory)} GiB "
    rule += f"each), but this host or container has {there / GIB:,.1f} GiB"
    fix = "train on GPUs (python -m jaxpar.plan shows how many), or use a smaller model"
    if devices * memory.state <= there / 2:
        fix = "take smaller steps, with a smaller "
        fix += f"{flag('train.global_batch_size')} or {flag('data.seq_len')}, or more "
        fix += flag("parallel.num_microbatches")
    raise ConfigError("model", f"{num_params(cfg.model):,} parameters", rule, fix)


def _count(devices: int) -> str:
    return "1 CPU device" if devices == 1 else f"{devices:,} CPU devices"


def _parts(memory: MemoryForecast) -> str:
    parts = {
        "weights": memory.weights,
        "optimizer": memory.optimizer,
        "gradients": memory.gradients,
        "activations": memory.activations + memory.buffers,
        "the rest": memory.logits + memory.gathered,
    }
    shown = {name: f"{size / GIB:,.1f}" for name, size in parts.items()}
    return ", ".join(f"{name} {text}" for name, text in shown.items() if text != "0.0")


# --------- Predicts a run's memory and step time, and compares them with the measurement at its end


@dataclass(frozen=True)
class Forecast:
    """The prediction for a run. `assumed` names the assumed network."""

    step_seconds: float
    memory_gib: float
    tokens_per_second_per_device: float
    assumed: str

    def record(self) -> dict[str, Any]:
        """Return the record for metrics.jsonl."""
        return {
            "predicted_step_seconds": self.step_seconds,
            "predicted_memory_gib": self.memory_gib,
        }

    def __str__(self) -> str:
        text = f"predicted  {self.memory_gib:.1f} GiB peak, {self.step_seconds:.3f} s a step, "
        return text + f"{self.tokens_per_second_per_device:,.0f} tok/s/device{self.assumed}"

    def beside(self, last: dict[str, Any]) -> str:
        """Compare the prediction with the last record of a run's metrics, in one line."""
        parts = [_pair("peak", self.memory_gib, last.get("memory_gib"), "GiB", 1)]
        parts.append(_pair("step", self.step_seconds, last.get("step_seconds"), "s", 3))
        return "predicted  and measured: " + ", ".join(filter(None, parts))


def _pair(what: str, predicted: float, measured: float | None, unit: str, digits: int) -> str:
    if not measured:
        return ""
    error = predicted / measured - 1
    return f"{what} {predicted:.{digits}f} and {measured:.{digits}f} {unit} ({error:+.1%})"


def forecast(cfg: Config, device_kind: str, devices: int, per_host: int) -> Forecast | None:
    """Predict a run and its last step; None for unknown devices, such as CPUs.

    Args:     cfg: resolved. device_kind: JAX's name of the device. per_host: devices per host.
    """
    gpu = gpu_of_kind(device_kind)
    if gpu is None:
        return None
    from jaxpar.prediction.communication import Cluster
    from jaxpar.prediction.ranking import predict

    cluster = Cluster(gpu, NETWORKS["ib400"], devices, per_host)
    last = step_sizes(cfg).at(cfg.train.num_steps - 1)
    try:
        layout, time = predict(cfg, cluster), predict(config_of(cfg, last), cluster).time
    except ConfigError:  # the run itself reports an unsupported attention kernel
        return None
    assumed = f" (assuming {cluster.network.name} between hosts)" if devices > per_host else ""
    return Forecast(time.total, layout.memory.total / GIB, time.rate, assumed)


def forecast_here(cfg: Config) -> Forecast | None:
    """Predict a run on this program's devices, assuming the same number on each host."""
    kind = jax.devices()[0].device_kind
    return forecast(cfg, kind, jax.device_count(), jax.local_device_count())


# ---------------------- Hints about sizes of a model with which GPUs compute matrix products slowly
#
# Tensor cores need rows that begin at multiples of 16 bytes; otherwise slower kernels run. They are
# fastest if rows are multiples of 128 bytes. (NVIDIA, Matrix Multiplication Background User's
# Guide, "Requirements to Use Tensor Cores".)


#: Bytes of which a row must be a multiple, and of which a hint's example is one.
NEEDED_BYTES, FASTEST_BYTES = 16, 128


def alignment_hints(cfg: Config) -> list[str]:
    """Return a line for each size whose shard on a device is no multiple of 16 bytes.

    Args:     cfg: resolved, or with axes set.
    """
    width = 1 if cfg.compute.matmul_dtype == "float8" else jnp.dtype(cfg.compute.dtype).itemsize
    needed, fastest = NEEDED_BYTES // width, FASTEST_BYTES // width
    hints: dict[str, str] = {}
    for path, value, size, ways in _matmul_sizes(cfg):
        if size // ways % needed and path not in hints:
            good = -(-value // (fastest * ways)) * fastest * ways
            each = f", {size // ways:,} on a device" if ways > 1 else ""
            faster = f"multiples of {needed} are faster on GPUs, such as {good:,}"
            hints[path] = f"{path} = {value:,}{each}: {faster}"
    return list(hints.values())


def _matmul_sizes(cfg: Config) -> Iterator[tuple[str, int, int, int]]:
    """Yield the address and value of a field, a dim of matrices that it makes, and over how many
    devices that is split: the widths of the model and of its feed-forwards."""
    model, p = cfg.model, cfg.parallel
    yield "model.d_model", model.d_model, model.d_model, 1
    yield "model.vocab_size", model.vocab_size, model.vocab_size, p.tensor * p.pipeline
    for layer in dict.fromkeys(model.layers):
        if (term := layer.feed_forward) is None:
            continue
        values = dict(numbers(term))
        for dim in dims_of(term, model, is_spread=spreads_experts(p)):
            if dim.fields and dim.axis in ("mlp", "whole_mlp"):
                path, ways = dim.fields[0], ways_of(dim.axis, p)
                yield f"model.{layer.name}.feed_forward.{path}", values[path], dim.size, ways
