"""Sinks of metrics in addition to metrics.jsonl: TensorBoard, W&B, MLflow, Prometheus.

metrics.jsonl is the primary record. A sink that fails is named in one warning and not used again;
training continues.
"""

import contextlib
import functools
import importlib
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import jax

from jaxpar.config import Config, ConfigError
from jaxpar.config.errors import require_package
from jaxpar.config.metrics import metric_of
from jaxpar.config.values import Value, require_code, to_values
from jaxpar.monitoring.metric_names import tag
from jaxpar.runtime.files import atomic, json_lines

#: Seconds between two flushes, which wait for the disk (fsync). A killed process loses the events
#: after the last flush; metrics.jsonl has them.
FLUSH_EVERY = 30.0


class TensorBoard:
    """Writes an event file for each start of a run; TensorBoard reads them as one run."""

    def __init__(self, folder: Path, first_step: int):
        """Start a file. TensorBoard drops what earlier files hold beyond `first_step`."""
        # The queue of tensorboardX hangs after its thread has met a full disk. The writer beneath
        # it writes synchronously, and raises.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._event = Event
        folder.mkdir(parents=True, exist_ok=True)
        # Files of the same second, as after a quick rewind, differ only in this suffix, and are
        # read in its order.
        suffix = f".{len(list(folder.glob('events.*'))):06d}"
        self._writer = EventsWriter(str(folder / "events"), suffix)
        self._flushed = -math.inf
        started = SessionLog(status=SessionLog.START)
        self._add(first_step + 1, session_log=started)

    def _add(self, step: int, **what) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, **what))
        if time.monotonic() - self._flushed > FLUSH_EVERY:
            self._writer.flush()
            self._flushed = time.monotonic()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all values."""
        values = [{"tag": tag(name), "simple_value": v} for name, v in metrics.items()]
        self._add(step, summary={"value": values})

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


#: Seconds that a run waits for a login at its start, and for the upload at its end. Data not sent
#: by then stays in RUN/wandb, for `wandb sync`. By default, W&B waits without limit.
WANDB_PATIENCE = 60.0


class WeightsAndBiases:
    """One W&B run for all starts of a run. WANDB_MODE=offline writes only to RUN/wandb.

    W&B cannot go back in steps. If a step is repeated after a resume or a rewind, W&B keeps its
    first values.
    """

    def __init__(self, project: str, run_dir: Path, about: Mapping[str, Any], name: str = ""):
        """Start or resume the W&B run whose id is in RUN/wandb/id.

        Args:     project: PROJECT or ENTITY/PROJECT. about: the config. name: of the run. Empty:
                  that of its folder.
        """
        import wandb

        self._wandb = wandb
        entity, _, place = project.rpartition("/")
        _wait_for_a_new_second(run_dir / "wandb")
        file = run_dir / "wandb" / "id"
        self._known = _last_step(run_dir) if file.is_file() else 0  # a new run has no steps
        self._run = wandb.init(
            entity=entity or None,
            project=place,
            id=_id(file),
            name=name or run_dir.name,
            dir=str(run_dir),
            config=dict(about),
            resume="allow",
            settings=wandb.Settings(
                console="off",
                login_timeout=WANDB_PATIENCE,
                finish_timeout=WANDB_PATIENCE,
                finish_timeout_raises=True,
            ),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, unless an earlier start has logged it."""
        if step > self._known:
            self._run.log({tag(name): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Finish the run. Online, this waits for the upload."""
        self._run.finish()
        # W&B's process may still hold data for the file, and this one ends without exit hooks.
        self._wandb.teardown()


def _wait_for_a_new_second(folder: Path) -> None:
    """Wait until the name of the folder is new: W&B names it by second and id."""
    while any(folder.glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-*")):
        time.sleep(0.05)


def _id(path: Path) -> str:
    """Read the id in a file, which is created with a new id if missing."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, f"{uuid.uuid4().hex[:12]}\n".encode())
    return path.read_text("utf-8").strip()


def _last_step(run_dir: Path) -> int:
    """Return the highest step in metrics.jsonl; 0 if there is none."""
    records = json_lines.read(run_dir / "metrics.jsonl")
    return max((int(record["step"]) for record in records if "step" in record), default=0)


#: Most parameters and metrics in one request, and most characters of a value: MLflow's limits.
MAX_PARAMS, MAX_METRICS, MAX_VALUE = 100, 1000, 500

#: Seconds for a request, and retries. By default, MLflow waits for minutes, and the run with it.
MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}

#: The variable with the address of the tracking server.
SERVER = "MLFLOW_TRACKING_URI"

#: The file of RUN with the id of its MLflow run.
ID_FILE = "mlflow_run_id"


def require_server(experiment: str) -> None:
    """Raises:   ConfigError without the address of a server: MLflow would use a local database,
    which needs more packages than mlflow-skinny has."""
    if not os.environ.get(SERVER):
        rule = f"needs the address of a tracking server in {SERVER}"
        raise ConfigError("metrics.mlflow", experiment, rule, f"set {SERVER}, or leave it out")


class MLflow:
    """One MLflow run for all starts of a run, in an experiment.

    The tracking server is that of MLFLOW_TRACKING_URI. Steps that are repeated after a resume or a
    rewind have two values in MLflow.
    """

    def __init__(self, experiment: str, run_dir: Path, about: Mapping[str, Any], name: str = ""):
        """Start or resume the MLflow run whose id is in RUN/mlflow_run_id.

        Args:     about: the config, whose fields become parameters. name: of the run. Empty: that
                  of its folder.
        """
        for variable, value in MLFLOW_PATIENCE.items():
            os.environ.setdefault(variable, value)
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient()
        file = run_dir / ID_FILE
        if file.is_file():
            self._id = file.read_text("utf-8").strip()
            self._client.update_run(self._id, "RUNNING")
            return
        found = self._client.get_experiment_by_name(experiment)
        where = found.experiment_id if found else self._client.create_experiment(experiment)
        self._id = self._client.create_run(where, run_name=name or run_dir.name).info.run_id
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(file, f"{self._id}\n".encode())
        self._log_params(about)

    def _log_params(self, about: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(path, str(value)[:MAX_VALUE]) for path, value in leaves(about)]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MAX_PARAMS])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step. MLflow has no infinities: they become NaN."""
        now = int(time.time() * 1000)
        finite = {n: v if math.isfinite(v) else math.nan for n, v in metrics.items()}
        rows = [self._metric(tag(_allowed(n)), v, now, step) for n, v in finite.items()]
        for first in range(0, len(rows), MAX_METRICS):
            self._client.log_batch(self._id, metrics=rows[first : first + MAX_METRICS])

    def close(self) -> None:
        """Mark the run as finished. The next start marks it as running again."""
        self._client.set_terminated(self._id, "FINISHED")


def leaves(about: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the fields of nested sections by path."""
    found: list[tuple[str, Any]] = []
    for name, value in about.items():
        if isinstance(value, Mapping):
            found += leaves(value, f"{prefix}{name}.")
        else:
            found.append((prefix + name, value))
    return found


def _allowed(name: str) -> str:
    """Return a name with the characters that MLflow allows: a source's path may have others."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)


class Prometheus:
    """Serves the latest values as gauges named jaxpar_NAME at http://ADDRESS:PORT/metrics."""

    def __init__(self, address: str, port: int, run_dir: Path):
        """Start the server, in its own thread."""
        from prometheus_client import CollectorRegistry, Gauge, Info, start_http_server

        self._gauge, self._registry = Gauge, CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        about = Info("jaxpar_run", "The run that these metrics describe.", registry=self._registry)
        about.info({"dir": str(run_dir)})
        self._server, self._thread = start_http_server(port, address, self._registry)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Serve these values from now on."""
        for name, value in {"step": float(step), **metrics}.items():
            base, _, which = name.partition("/")
            label = "layer" if metric_of(base).group == "layers" else "source"
            gauge = self._gauge_of(base, [label] if which else [])
            (gauge.labels(which) if which else gauge).set(value)

    def _gauge_of(self, name: str, labels: list[str]):
        if name not in self._gauges:
            known = metric_of(name)
            text = f"{known.meaning} [{known.unit or 'no unit'}]"
            text = "finished steps" if name == "step" else text
            allowed = re.sub(r"\W", "_", f"jaxpar_{name}", flags=re.ASCII)
            self._gauges[name] = self._gauge(allowed, text, labels, registry=self._registry)
        return self._gauges[name]

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class MetricSink(Value):
    """A sink of a user: a value of `metrics.sinks`. Its fields are options."""

    kind: ClassVar[str] = "MetricSink"

    def open(self, folder: Path, step: int) -> Any:
        """Called in process 0 at each start of the run.

        Args:
            folder: of the run.
            step: steps done. Steps after it may have been written by an earlier start.
        Returns:  what `write` and `close` get: a file, a connection.
        """
        return None

    def write(self, opened: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics after `step` steps, as `Sink.write`."""
        raise NotImplementedError

    def close(self, opened: Any) -> None:
        """Finish writing."""


class _Own:
    """A user's sink, opened."""

    def __init__(self, sink: Any, folder: Path, step: int):
        self._sink, self._opened = sink, sink.open(folder, step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._sink.write(self._opened, step, metrics)

    def close(self) -> None:
        self._sink.close(self._opened)


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
    require_code(cfg, ["metrics.sinks"])
    for number, sink in enumerate(m.sinks, 1):
        ways[f"{type(sink).__name__} (sink {number})"] = functools.partial(
            _Own, sink, run_dir, first_step
        )
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
