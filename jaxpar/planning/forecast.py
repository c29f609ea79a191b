"""Predicts a run's memory and step time, and compares them with the measurement at its end."""

from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.config import Config, ConfigError
from jaxpar.config.lists.step_sizes import config_of, step_sizes
from jaxpar.planning.predict.communication import Cluster
from jaxpar.planning.predict.hardware import GIB, NETWORKS, gpu_of_kind
from jaxpar.planning.ranking import predict


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
