"""Metrics for MLflow."""

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.monitoring.metric_names import tag
from jaxpar.runtime.files import atomic

#: Most parameters and metrics in one request, and most characters of a value: MLflow's limits.
MAX_PARAMS, MAX_METRICS, MAX_VALUE = 100, 1000, 500

#: Seconds for a request, and retries. By default, MLflow waits for minutes, and the run with it.
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}

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
        for variable, value in PATIENCE.items():
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
