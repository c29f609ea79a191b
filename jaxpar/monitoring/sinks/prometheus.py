"""Metrics for Prometheus: the latest values, over HTTP."""

import re
from collections.abc import Mapping
from pathlib import Path

from jaxpar.config.metrics import metric_of


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
