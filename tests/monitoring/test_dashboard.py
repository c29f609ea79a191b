"""The dashboard and the alerts know the metrics; a Prometheus that scrapes a run answers them."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

from jaxpar.config.metrics import METRICS
from tests.monitoring.test_sinks import free_port

pytestmark = pytest.mark.waits

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "scripts" / "deploy" / "grafana_dashboard.json"
RULES = ROOT / "scripts" / "deploy" / "prometheus_rules.yml"

#: Metrics of the sink that are not in metrics.jsonl.
OWN = {"step", "run_info"}


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


def queries() -> list[str]:
    """Those of the dashboard, with all runs chosen."""
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    exprs = [target["expr"] for panel in panels for target in panel["targets"]]
    return [expr.replace("$instance", ".*") for expr in exprs]


def rules() -> list[dict]:
    return yaml.safe_load(RULES.read_text("utf-8"))["groups"][0]["rules"]


def names_in(expr: str) -> set[str]:
    return set(re.findall(r"\bjaxpar_(\w+)", expr))


def test_it_is_as_its_script_writes_it():
    path = ROOT / "scripts" / "docs" / "grafana_dashboard.py"
    spec = importlib.util.spec_from_file_location("grafana_dashboard", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert json.loads(DASHBOARD.read_text("utf-8")) == script.dashboard()


def test_every_name_is_a_metric():
    exprs = [*queries(), *(rule["expr"] for rule in rules())]
    assert len(exprs) > 30
    for expr in exprs:
        assert names_in(expr) - OWN <= METRICS.keys(), expr
    shown = set().union(*map(names_in, queries()))
    assert {"loss", "held_out_loss", "mfu", "gpu_watts", "joules_per_token", "xid_errors"} <= shown


#: Alerts, and samples of a series every minute with which each must fire, or must not.
ALERTS = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'up{{job="jaxpar", instance="down"}}', values: '0x40'}}
      - {{series: 'jaxpar_step{{instance="stuck"}}', values: '7x40'}}
      - {{series: 'jaxpar_step{{instance="fine"}}', values: '0+3x40'}}
      - {{series: 'jaxpar_loss{{instance="bad"}}', values: '2 NaN NaN'}}
      - {{series: 'jaxpar_loss{{instance="fine"}}', values: '2+0x40'}}
      - {{series: 'jaxpar_xid_errors{{instance="bad"}}', values: '0 1x40'}}
      - {{series: 'jaxpar_xid_errors{{instance="fine"}}', values: '0x40'}}
    alert_rule_test:
      - eval_time: 25m
        alertname: JaxparDown
        exp_alerts:
          - exp_labels: {{severity: critical, job: jaxpar, instance: down}}
            exp_annotations: {{summary: "down serves no metrics: the run has ended or hangs"}}
      - eval_time: 25m
        alertname: JaxparNoStep
        exp_alerts:
          - exp_labels: {{severity: critical, instance: stuck}}
            exp_annotations: {{summary: "stuck has logged no step for 15 minutes"}}
      - eval_time: 2m
        alertname: JaxparLossNotFinite
        exp_alerts:
          - exp_labels: {{severity: critical, instance: bad}}
            exp_annotations: {{summary: "bad: the loss is NaN or infinite"}}
      - eval_time: 5m
        alertname: JaxparXid
        exp_alerts:
          - exp_labels: {{severity: critical, instance: bad}}
            exp_annotations: {{summary: "bad: its GPUs reported 1 Xid errors"}}
"""


@pytest.mark.slow
def test_alerts_fire_when_they_should(tmp_path):
    promtool = program("promtool")
    subprocess.run([promtool, "check", "rules", str(RULES)], check=True, capture_output=True)
    file = tmp_path / "alerts.yml"
    file.write_text(ALERTS.format(rules=RULES))
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def ask(port: int, path: str, **given: str) -> dict:
    """What Prometheus answers."""
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(given)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
def test_prometheus_that_scrapes_a_run_answers_every_query(write_config, tmp_path):
    """Queries of metrics that the run has are not empty; all others are valid."""
    binary, port, of_run = program("prometheus"), free_port(), free_port()
    (tmp_path / "prometheus.yml").write_text(
        textwrap.dedent(f"""
            global: {{scrape_interval: 1s, evaluation_interval: 1s}}
            rule_files: [{RULES}]
            scrape_configs:
              - job_name: jaxpar
                static_configs: [{{targets: ["127.0.0.1:{of_run}"]}}]
            """)
    )
    start = [binary, f"--config.file={tmp_path}/prometheus.yml"]
    start += [f"--storage.tsdb.path={tmp_path}/tsdb", f"--web.listen-address=127.0.0.1:{port}"]
    train = [sys.executable, "-m", "jaxpar.train", write_config(tmp_path)]
    train += [
        f"--metrics.prometheus-port={of_run}",
        "--train.num-steps=3000",
        "--train.log-every=5",
    ]
    train += ["--evaluation.every=20", "--checkpoint.every=0"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server, run = subprocess.Popen(start, **quiet), subprocess.Popen(train, env=env, **quiet)
    try:
        until = time.monotonic() + 600
        while time.monotonic() < until:
            time.sleep(1)
            if run.poll() is not None:
                break
            try:
                found = ask(port, "query", query="changes(jaxpar_held_out_loss[1m]) > 2")
            except OSError:
                continue
            if found["data"]["result"]:
                break
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        known = {name for line in lines for name in json.loads(line)}
        assert {"loss", "held_out_loss", "tokens_per_second"} <= known
        answered = 0
        for expr in queries():
            answer = ask(port, "query", query=expr)
            assert answer["status"] == "success", expr
            if names_in(expr) <= known:
                assert answer["data"]["result"], expr
                answered += 1
        assert answered > 12
        (group,) = ask(port, "rules")["data"]["groups"]
        assert [rule["health"] for rule in group["rules"]] == ["ok"] * len(rules())
        assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []
    finally:
        for process in (run, server):
            process.terminate()
            process.wait(600)
