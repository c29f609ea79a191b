"""A real run, watched: scraped while it trains, in TensorBoard, and on the page of its report."""

import json
import re
import threading
import time
import urllib.request

import pytest

from jaxpar.config.metrics import METRICS
from jaxpar.monitoring.metric_names import TABLE_FILE, tag
from jaxpar.tools.report.command import report
from jaxpar.tools.report.options import ReportOptions
from tests.monitoring.test_sinks import free_port, scalars

pytestmark = pytest.mark.waits

STEPS = 12


class Scraper(threading.Thread):
    """Asks for the metrics again and again, and keeps the answers."""

    def __init__(self, port: int):
        super().__init__(daemon=True)
        self.url, self.answers, self.over = f"http://127.0.0.1:{port}/metrics", [], False
        self.start()

    def run(self):
        while not self.over:
            try:
                with urllib.request.urlopen(self.url, timeout=5) as answer:
                    self.answers.append(answer.read().decode())
            except OSError:
                pass  # it is not there yet, or not any more
            time.sleep(0.01)


@pytest.fixture(scope="module")
def watched(write_config, train_on, tmp_path_factory):
    pytest.importorskip("prometheus_client")
    folder, port = tmp_path_factory.mktemp("watched"), free_port()
    scraper = Scraper(port)
    flags = f"""--train.num-steps {STEPS} --optimizer.warmup-steps 2 --checkpoint.every 6
    --evaluation.every 6 --metrics.prometheus-port {port}""".split()
    assert train_on(1, write_config(folder), *flags) == 0
    scraper.over = True
    scraper.join()
    return folder / "run", scraper.answers


def test_prometheus_is_served_while_the_run_goes_on(watched):
    _, answers = watched
    found = (re.search(r"^jaxpar_step (\S+)$", text, re.M) for text in answers)
    steps = [float(step[1]) for step in found if step]
    assert steps == sorted(steps) and steps[-1] <= STEPS and len(steps) > 1
    assert "\njaxpar_loss " in answers[-1] and str(watched[0]) in answers[-1]


def test_tensorboard_has_what_the_records_have(watched):
    run, _ = watched
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "grad_norm", "held_out_loss"):
        expected = [(r["step"], r[name]) for r in records if name in r]
        assert [step for step, _ in scalars(run, tag(name))] == [step for step, _ in expected]
        values = [value for _, value in scalars(run, tag(name))]
        assert values == pytest.approx([value for _, value in expected], rel=1e-6)
    unknown = {name for record in records for name in record} - METRICS.keys()
    assert unknown <= {"step", "slowest", "resumed_after_step"}
    table = json.loads((run / TABLE_FILE).read_text())["metrics"]
    assert table.keys() == {name for record in records for name in record} - {"step", "slowest"}


def test_its_report(watched):
    run, _ = watched
    path, (read,) = report(ReportOptions(runs=(str(run),)))
    assert read.last_step == STEPS and len(read.series["loss"].points()) == STEPS
    assert [(mark.kind, mark.step) for mark in read.marks] == [("saved", 6), ("saved", 12)]
    text = path.read_text("utf-8")
    assert all(f'id="{name}"' in text for name in ("loss", "step-time", "progress", "goodput"))
