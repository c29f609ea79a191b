"""Sinks of metrics in addition to metrics.jsonl: TensorBoard, W&B, MLflow, Prometheus.

metrics.jsonl is the primary record. A sink that fails is named in one warning and not used again;
training continues.
"""

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax

from jaxpar.config import Config
from jaxpar.config.packages import require_package
from jaxpar.config.values import to_values
from jaxpar.monitoring.sinks.mlflow import MLflow, require_server
from jaxpar.monitoring.sinks.prometheus import Prometheus
from jaxpar.monitoring.sinks.tensorboard import TensorBoard
from jaxpar.monitoring.sinks.wandb import WeightsAndBiases


class Sink(Protocol):
    """Receives the metrics of a run, in the order of its steps."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics after `step` steps, by name in metrics.jsonl; NaN if non-finite.

        Args:     metrics: "NAME/3" is that of layer 3, or of the entry of a list.
        """

    def close(self) -> None:
        """Finish writing. No more metrics follow."""


class Sinks:
    """The sinks of a run. A failing sink never ends the run."""

    def __init__(self, ways: Mapping[str, Callable[[], Sink]], log: Callable[[str], None]):
        """Open all sinks.

        Args:     ways: functions that open a sink, by name. log: called for each that fails.
        """
        self._log, self._sinks = log, dict[str, Sink]()
        for name, way in ways.items():
            with _Failing(self, name, "could not be opened"):
                self._sinks[name] = way()

    def write(self, record: Mapping[str, Any]) -> None:
        """Pass a record of metrics.jsonl to the sinks, if it belongs to a step."""
        if "step" not in record or not self._sinks:
            return
        values = numbers(record) | entries(record)
        for name, sink in list(self._sinks.items()):
            with _Failing(self, name, f"failed at step {record['step']}"):
                sink.write(record["step"], values)

    def close(self) -> None:
        """Close all sinks that have not failed."""
        for name, sink in list(self._sinks.items()):
            with _Failing(self, name, "could not be closed"):
                sink.close()
        self._sinks.clear()

    def failed(self, name: str, what: str, error: BaseException) -> None:
        """Warn, and do not use the sink again."""
        self._sinks.pop(name, None)
        reason = (str(error) or type(error).__name__).partition("\n")[0][:300]
        self._log(f"WARNING    {name} {what}; it gets no more metrics until a restart: {reason}")


class _Failing:
    """A context whose exceptions become a warning."""

    def __init__(self, sinks: Sinks, name: str, what: str):
        self._sinks, self._name, self._what = sinks, name, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        # A library must not end the process by SystemExit; Ctrl-C may.
        if not isinstance(error, Exception | SystemExit):
            return False
        self._sinks.failed(self._name, self._what, error)
        return True


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Flatten the numbers of a record, with NaN for null. Omits its step and its strings."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": v for inner, v in numbers(value).items()}
        elif value is None:
            found[name] = math.nan
        elif isinstance(value, int | float) and name != "step":
            found[name] = _as_float(value)
    return found


def entries(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of the lists of a record, as NAME/INDEX. Omits those that are null."""
    return {
        f"{name}/{at}": _as_float(value)
        for name, values in record.items()
        if isinstance(values, list)
        for at, value in enumerate(values)
        if isinstance(value, int | float)
    }


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of 309 digits or more
        return math.inf if value > 0 else -math.inf


def open_sinks(
    cfg: Config, run_dir: Path, first_step: int, log: Callable[[str], None], name: str = ""
) -> Sinks:
    """Open the sinks that the config enables, in process 0; none in the others.

    Args:     first_step: steps done so far; metrics of an earlier attempt beyond it are replaced.
              name: of the run in W&B. Empty: that of its folder.
    """
    m, ways = cfg.metrics, dict[str, Callable[[], Sink]]()
    if jax.process_index() != 0:
        return Sinks(ways, log)
    if m.tensorboard:
        folder = run_dir / "tensorboard"
        ways["TensorBoard"] = functools.partial(TensorBoard, folder, first_step)
    if m.wandb:
        about = to_values(cfg)
        ways["W&B"] = functools.partial(WeightsAndBiases, m.wandb, run_dir, about, name)
    if m.mlflow:
        about = to_values(cfg)
        ways["MLflow"] = functools.partial(MLflow, m.mlflow, run_dir, about, name)
    if m.prometheus_port:
        address, port = m.prometheus_address, m.prometheus_port
        ways["Prometheus"] = functools.partial(Prometheus, address, port, run_dir)
    return Sinks(ways, log)


def require_packages(cfg: Config) -> None:
    """Raises:   ConfigError when a sink needs a package, or a server, that is not there."""
    m = cfg.metrics
    needs = (
        ("metrics.wandb", m.wandb, "wandb", "wandb"),
        ("metrics.mlflow", m.mlflow, "mlflow-skinny", "mlflow"),
        ("metrics.prometheus_port", m.prometheus_port, "prometheus-client", "prometheus_client"),
    )
    for path, value, package, module in needs:
        if value:
            require_package(package, path, value, "leave it out", module)
    if m.mlflow:
        require_server(m.mlflow)


def import_packages(cfg: Config) -> None:
    """Import the packages that `open_sinks` needs in process 0, which may take seconds.

    tensorboardX imports torch if it is installed. A package that fails is reported by `open_sinks`.
    """
    m = cfg.metrics
    packages = {
        "tensorboardX.event_file_writer": m.tensorboard,
        "wandb": bool(m.wandb),
        "mlflow.tracking": bool(m.mlflow),
        "prometheus_client": bool(m.prometheus_port),
    }
    for name, wanted in packages.items():
        if wanted and jax.process_index() == 0:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
