"""Sinks, each read back by the library that it is for; none of them can end a run."""

import json
import math
import socket
import struct
import urllib.request

import numpy as np
import pytest

from jaxpar.config import Config, ConfigError, Source, replace
from jaxpar.config.metrics import METRICS, Metric, declare_more
from jaxpar.monitoring.evaluations import Score
from jaxpar.monitoring.metric_names import TABLE_FILE, read_table, tag
from jaxpar.monitoring.metrics import MetricsWriter
from jaxpar.monitoring.sinks import Sinks, numbers, open_sinks, require_packages

LOSS, HELD_OUT = tag("loss"), tag("held_out_loss")


def config(**values) -> Config:
    small = {"train.num_steps": 9, "train.log_every": 1, "data.seq_len": 8}
    return replace(Config(), **small, **values)


def train(cfg, folder, first, last, *, loss=lambda step: step + 0.5, sinks=None) -> None:
    """Steps first + 1 to last, as the training loop reports them."""
    sinks = sinks or open_sinks(cfg, folder, first, pytest.fail)
    with MetricsWriter(cfg, folder, first, lambda step: 0.1, sinks=sinks) as writer:
        for step in range(first, last):
            values = dict(loss=loss(step), grad_norm=1.0, num_tokens=16.0)
            writer.write_previous(step, values, data_wait=0.0)
        writer.flush()
        writer.evaluation(last, {"held_out": Score(7.0, None)})


def scalars(folder, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of a metric."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_reads_what_was_written(devices, tmp_path):
    train(config(), tmp_path, 0, 4)
    assert scalars(tmp_path, LOSS) == [(1, 0.5), (2, 1.5), (3, 2.5), (4, 3.5)]
    assert scalars(tmp_path, HELD_OUT) == [(4, 7.0)]
    seen = {record_name for record_name in written(tmp_path) if record_name != "step"}
    assert {tag(name) for name in seen} <= set(tags(tmp_path))


def test_a_record_of_many_sources_is_short(devices, tmp_path):
    """metrics.jsonl has their epochs in the order of data.mixture, sinks have their names."""
    sources = {f"s3://bucket/data/common-crawl/part-{n}": 1 / 3 + n for n in range(200)}
    cfg = config(**{"data.mixture": tuple(Source(path, 1.0) for path in sources)})
    sinks = open_sinks(cfg, tmp_path, 0, pytest.fail)
    with MetricsWriter(cfg, tmp_path, 0, lambda step: 0.1, lambda step: sources, sinks=sinks) as w:
        w.write_previous(0, dict(loss=1.0, grad_norm=1.0, num_tokens=16.0), 0.0)
        w.flush()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(line) < 2500
    np.testing.assert_allclose(json.loads(line)["epochs"], [*sources.values()], rtol=1e-4)
    last = f"training/epochs/{[*sources][-1]}"
    assert scalars(tmp_path, last) == [(1, pytest.approx(199 + 1 / 3))]


def written(folder) -> set[str]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {name for line in lines for name in json.loads(line)}


def tags(folder) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    return events.Reload().Tags()["scalars"]


def test_steps_taken_again_are_in_tensorboard_once(devices, tmp_path):
    train(config(), tmp_path, 0, 6)
    train(config(), tmp_path, 2, 4, loss=lambda step: 100.0 + step)  # at once: the same second
    train(config(), tmp_path, 3, 5, loss=lambda step: 200.0 + step)
    then = [(1, 0.5), (2, 1.5), (3, 102.0), (4, 203.0), (5, 204.0)]
    assert scalars(tmp_path, LOSS) == then
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3


def test_a_start_from_scratch_replaces_all(devices, tmp_path):
    train(config(), tmp_path, 0, 3)
    train(config(), tmp_path, 0, 2, loss=lambda step: 9.0)
    assert scalars(tmp_path, LOSS) == [(1, 9.0), (2, 9.0)]


def test_numbers_of_a_record():
    record = {"step": 3, "loss": None, "mfu": 0.5, "slowest": "host", "epochs": {"a/b": 1.5}}
    found = numbers(record)
    assert math.isnan(found.pop("loss")) and found == {"mfu": 0.5, "epochs/a/b": 1.5}
    assert tag("epochs/a/b") == "training/epochs/a/b" and tag("new") == "other/new"


def test_other_processes_write_nothing(devices, tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    open_sinks(config(), tmp_path, 0, pytest.fail).write({"step": 1, "loss": 1.0})
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------ failures


class Broken:
    """A sink that fails at a step, or when it is closed."""

    def __init__(self, at: int, error: BaseException):
        self.at, self.error, self.steps, self.closed = at, error, [], False

    def write(self, step, metrics):
        self.steps.append(step)
        if step == self.at:
            raise self.error

    def close(self):
        self.closed = True
        if self.at == 0:
            raise self.error


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SystemExit(1)])
def test_a_sink_that_fails_is_named_once_and_the_others_go_on(devices, tmp_path, error):
    said, bad, good, last = [], Broken(2, error), Broken(-1, error), Broken(0, error)
    sinks = Sinks({"bad": lambda: bad, "good": lambda: good, "last": lambda: last}, said.append)
    train(config(), tmp_path, 0, 4, sinks=sinks)
    assert good.steps == [1, 2, 3, 4, 4] and good.closed
    assert bad.steps == [1, 2] and not bad.closed
    assert [line.split()[1] for line in said] == ["bad", "last"] and "at step 2" in said[0]
    assert "loss" in written(tmp_path)


def test_a_sink_that_cannot_be_opened_is_left_out(devices, tmp_path):
    said = []
    (tmp_path / "tensorboard").write_text("a file")
    sinks = open_sinks(config(), tmp_path, 0, said.append)
    train(config(), tmp_path, 0, 2, sinks=sinks)
    (line,) = said
    assert line.startswith("WARNING    TensorBoard could not be opened") and "exists" in line


def test_ctrl_c_is_not_a_failure(tmp_path):
    broken = Broken(1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Sinks({"a": lambda: broken}, pytest.fail).write({"step": 1, "loss": 1.0})


@pytest.mark.parametrize(
    ("field", "value", "package"),
    [("wandb", "p", "wandb"), ("prometheus_port", 9400, "prometheus-client")],
)
def test_a_package_that_is_missing_is_named_before_the_start(monkeypatch, field, value, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    require_packages(config())
    with pytest.raises(
        ConfigError, match=rf"metrics\.{field} = .*needs {package}, .*pip install {package}"
    ):
        require_packages(config(**{f"metrics.{field}": value}))


# ----------------------------------------------------------------------------- the other sinks


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_prometheus_is_served_the_latest_numbers(devices, tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    port = free_port()
    cfg = config(**{"metrics.prometheus_port": port, "metrics.tensorboard": False})
    sinks = open_sinks(cfg, tmp_path, 0, pytest.fail)

    def scraped() -> dict:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            families = list(parser.text_string_to_metric_families(answer.read().decode()))
        return {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}

    sinks.write({"step": 1, "loss": 3.5, "epochs": {"a": 0.5}, "slowest": "x"})
    assert scraped()["jaxpar_loss",] == 3.5 and scraped()["jaxpar_epochs", "a"] == 0.5
    sinks.write({"step": 2, "loss": None})
    now = scraped()
    assert now["jaxpar_step",] == 2 and math.isnan(now["jaxpar_loss",])
    assert now["jaxpar_run_info", str(tmp_path)] == 1
    sinks.close()
    with pytest.raises(OSError):
        scraped()
    again = open_sinks(cfg, tmp_path, 0, pytest.fail)  # the port is free again
    again.close()


def test_a_port_that_is_taken_ends_nothing(devices, tmp_path):
    pytest.importorskip("prometheus_client")
    said = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cfg = config(**{"metrics.prometheus_port": port, "metrics.tensorboard": False})
        train(cfg, tmp_path, 0, 2, sinks=open_sinks(cfg, tmp_path, 0, said.append))
    assert len(said) == 1 and "in use" in said[0]


@pytest.fixture
def offline(monkeypatch, tmp_path) -> Config:
    """A config with W&B alone, which sends nothing."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "own"))
    return config(**{"metrics.wandb": "somebody/jaxpar", "metrics.tensorboard": False})


@pytest.mark.slow
def test_wandb_offline_is_one_run_over_all_starts(devices, tmp_path, offline):
    cfg = offline
    folder = tmp_path / "a run"
    folder.mkdir()
    train(cfg, folder, 0, 4)
    train(cfg, folder, 2, 6, loss=lambda step: 100.0 + step)
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    runs, histories = zip(*map(read_wandb, files), strict=True)
    (name,) = {run.run_id for run in runs}
    assert name == (folder / "wandb" / "id").read_text().strip()
    assert {(run.entity, run.project, run.display_name) for run in runs} == {
        ("somebody", "jaxpar", "a run")
    }
    losses = [(step, values[LOSS]) for part in histories for step, values in part if LOSS in values]
    assert losses == [(1, 0.5), (2, 1.5), (3, 2.5), (4, 3.5), (5, 104.0), (6, 105.0)]
    assert any(values.get(HELD_OUT) == 7.0 for step, values in histories[1])


def test_a_new_wandb_run_has_the_steps_that_are_taken_again(devices, tmp_path, offline):
    """Where an earlier start had no W&B, or its id was deleted: no run of W&B's has them."""
    train(config(**{"metrics.tensorboard": False}), tmp_path, 0, 4)
    train(offline, tmp_path, 2, 6)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    _, history = read_wandb(file)
    assert [step for step, values in history if LOSS in values] == [3, 4, 5, 6]


def read_wandb(path):
    """The run, and (step, numbers) of its history, of a file that W&B would send."""
    from wandb.proto import wandb_internal_pb2 as pb

    run, history = None, []
    for data in logged(path.read_bytes()):
        record = pb.Record.FromString(data)
        if record.HasField("run"):
            run = record.run
        if record.HasField("history"):
            items = record.history.item
            values = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in items}
            history.append((values["_step"], values))
    return run, history


def logged(file: bytes):
    """The records of a LevelDB log, after W&B's seven bytes: blocks of 32 KiB, in which records, or
    parts of them, have a checksum, a length and a kind."""
    place, parts = 7, b""
    while place + 7 <= len(file):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", file, place)
        parts += file[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_every_metric_has_a_tab_and_a_meaning():
    assert all(metric.group and metric.meaning for metric in METRICS.values())


# ---------------------------------------------------------------- metrics of layers, users' metrics


@pytest.fixture
def own(monkeypatch):
    """Metrics that users' code has declared."""
    monkeypatch.setattr("jaxpar.config.metrics.MORE", {})
    declare_more(
        {"stream": Metric("layers", "m", "of a probe"), "a-b": Metric("training", "", "x")}
    )


def test_metrics_of_layers_have_a_tag_and_a_label_each(own, devices, tmp_path):
    pytest.importorskip("prometheus_client")
    record = {"step": 1, "loss": 2.0, "stream": [0.5, None, 1.5], "a-b": 3.0}
    port = free_port()
    cfg = config(**{"metrics.prometheus_port": port})
    sinks = open_sinks(cfg, tmp_path, 0, pytest.fail)
    sinks.write(record)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    sinks.close()
    assert scalars(tmp_path, "layers/stream/2") == [(1, 1.5)]
    assert sorted(tags(tmp_path)) == [
        *("layers/stream/0", "layers/stream/2", "training/a-b", "training/loss")
    ]
    assert 'jaxpar_stream{layer="2"} 1.5' in text and "jaxpar_a_b 3.0" in text
    assert "jaxpar_stream of a probe [m]" in text


def test_a_run_says_what_its_metrics_are(own, devices, tmp_path):
    train(config(), tmp_path, 0, 2)
    file = tmp_path / TABLE_FILE
    table = json.loads(file.read_text())
    assert table["version"] == 1 and written(tmp_path) - table["metrics"].keys() <= {"step"}
    assert table["metrics"]["loss"]["unit"] == "nats per token"
    file.unlink()  # somebody deletes it
    with MetricsWriter(config(), tmp_path, 2, lambda step: 0.1) as writer:
        writer.write({"step": 3, "loss": 1.0})
        at_first = file.stat()
        writer.write({"step": 4, "loss": 1.0})
        assert file.stat().st_ino == at_first.st_ino
        writer.write({"step": 5, "stream": [1.0], "unknown": 2.0})
    found = read_table(tmp_path)
    assert found["stream"] == Metric("layers", "m", "of a probe") and "unknown" not in found
    assert "loss" in found and read_table(tmp_path / "no")["mfu"].unit == "share"


def test_values_that_are_no_numbers_are_null_in_lists_too(own, devices, tmp_path):
    with MetricsWriter(config(), tmp_path, 0, lambda step: 0.1) as writer:
        stream = np.array([1.0, np.nan, np.inf], np.float32)
        values = dict(loss=1.0, grad_norm=1.0, num_tokens=16.0, early=math.nan, stream=stream)
        writer.write_previous(0, values, data_wait=0.0)
        writer.flush()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["stream"] == [1.0, None, None] and record["early"] is None
    assert record["learning_rate"] == 0.1
