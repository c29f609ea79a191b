"""The dashboard for Grafana: python scripts/docs/grafana_dashboard.py [--write]

It shows the metrics of the Prometheus sink.

Printed; with --write, written to scripts/deploy/grafana_dashboard.json. Grafana imports the file
under Dashboards, New, Import, and asks for the Prometheus data source.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "scripts" / "deploy" / "grafana_dashboard.json"

#: Selects the runs that are chosen at the top of the dashboard.
RUNS = '{instance=~"$instance"}'

#: Title, unit of Grafana, and the metrics of each panel, without their prefix.
PANELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Loss", "none", ("loss", "held_out_loss", "mtp_loss")),
    ("Bits per byte of held-out text", "none", ("bits_per_byte",)),
    ("Gradient norm", "none", ("grad_norm",)),
    ("Learning rate", "sci", ("learning_rate",)),
    ("Tokens per second and device", "none", ("tokens_per_second_per_device",)),
    ("MFU", "percentunit", ("mfu", "mfu_full_attention")),
    ("Step time", "s", ("step_seconds", "data_wait_seconds")),
    ("Host time per step", "s", ("host_seconds_median", "host_seconds_slowest")),
    ("Peak memory", "gbytes", ("memory_gib", "gpu_memory_gib")),
    ("Power of a GPU", "watt", ("gpu_watts",)),
    ("Clock of the slowest GPU", "rotmhz", ("gpu_clock_mhz",)),
    ("Temperature of the hottest GPU", "celsius", ("gpu_celsius",)),
    ("Energy per token", "joule", ("joules_per_token",)),
    ("Xid errors, skipped updates", "none", ("xid_errors", "skipped")),
    ("Loads of experts", "none", ("fullest_expert", "fullest_rank", "expert_entropy")),
    ("Waiting for the store: checkpoints", "none", ("store_waiting_steps",)),
    ("Waiting for the store: age", "s", ("store_waiting_seconds",)),
    ("Epochs", "none", ("epochs",)),
)

#: Numbers at the top: title, unit, expression.
STATS = (
    ("Step", "none", f"jaxpar_step{RUNS}"),
    ("Tokens", "short", f"jaxpar_tokens_seen{RUNS}"),
    ("Tokens per second", "short", f"jaxpar_tokens_per_second{RUNS}"),
    ("Steps per minute", "none", f"60 * deriv(jaxpar_step{RUNS}[10m])"),
)

SOURCE = {"type": "prometheus", "uid": "${source}"}


def panel(number: int, kind: str, title: str, unit: str, place: dict, exprs: list[tuple[str, str]]):
    """A panel with one query for each (expression, legend)."""
    targets = [
        {"datasource": SOURCE, "expr": expr, "legendFormat": legend, "refId": chr(ord("A") + i)}
        for i, (expr, legend) in enumerate(exprs)
    ]
    return {
        "id": number,
        "type": kind,
        "title": title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": targets,
    }


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana's JSON."""
    panels = []
    for i, (title, unit, expr) in enumerate(STATS):
        place = {"x": 6 * i, "y": 0, "w": 6, "h": 4}
        panels.append(panel(i + 1, "stat", title, unit, place, [(expr, "{{instance}}")]))
    for i, (title, unit, names) in enumerate(PANELS):
        place = {"x": 12 * (i % 2), "y": 4 + 8 * (i // 2), "w": 12, "h": 8}
        several = len(names) > 1
        exprs = [
            (f"jaxpar_{name}{RUNS}", f"{{{{instance}}}} {{{{source}}}} {name if several else ''}")
            for name in names
        ]
        exprs = [(expr, " ".join(legend.split())) for expr, legend in exprs]
        panels.append(panel(len(panels) + 1, "timeseries", title, unit, place, exprs))
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"}
    query = "label_values(jaxpar_step, instance)"
    instance = {
        "name": "instance",
        "type": "query",
        "label": "Run",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "instances"},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "title": "jaxpar",
        "uid": "jaxpar",
        "tags": ["jaxpar"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, instance]},
        "panels": panels,
    }


def main() -> None:
    """Print or write it."""
    text = json.dumps(dashboard(), indent=1) + "\n"
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
