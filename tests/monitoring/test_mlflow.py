"""The MLflow sink, read back by MLflow."""

import math

import pytest

from jaxpar.config import ConfigError
from jaxpar.monitoring.metric_names import tag
from jaxpar.monitoring.sinks import MAX_VALUE, leaves, require_packages
from tests.monitoring.test_sinks import config, train

ON = {"metrics.mlflow": "jaxpar", "metrics.tensorboard": False}


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow, which stores runs as files."""
    found = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    return found


@pytest.mark.slow
def test_all_starts_of_a_run_are_one_run(devices, tmp_path, mlflow):
    run = tmp_path / "run"
    train(config(**ON), run, 0, 3)
    train(config(**ON), run, 2, 5, loss=lambda step: math.inf if step == 3 else 9.0)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("jaxpar")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == (run / "mlflow_run_id").read_text().strip()
    assert found.info.run_name == "run" and found.info.status == "FINISHED"
    assert found.data.params["train.num_steps"] == "9" and len(found.data.params) > 100
    losses = client.get_metric_history(found.info.run_id, tag("loss"))
    values = [(m.step, m.value) for m in losses if math.isfinite(m.value)]
    assert sorted(values) == [(1, 0.5), (2, 1.5), (3, 2.5), (3, 9.0), (5, 9.0)]
    assert found.data.metrics[tag("held_out_loss")] == 7.0


def test_a_server_that_is_not_there_does_not_end_the_run(devices, tmp_path, mlflow, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    from jaxpar.monitoring.sinks import open_sinks

    said: list[str] = []
    cfg = config(**ON)
    train(cfg, tmp_path, 0, 2, sinks=open_sinks(cfg, tmp_path, 0, said.append))
    (line,) = said
    assert line.startswith("WARNING    MLflow could not be opened")
    assert (tmp_path / "metrics.jsonl").read_text().count('"loss"') == 2


def test_without_a_server_it_is_refused(monkeypatch, mlflow):
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(ConfigError, match=r"metrics\.mlflow.*MLFLOW_TRACKING_URI"):
        require_packages(config(**ON))


def test_fields_are_parameters_by_path():
    assert leaves({"a": {"b": 1, "c": {"d": 2}}, "e": None}) == [
        ("a.b", 1),
        ("a.c.d", 2),
        ("e", None),
    ]
    assert MAX_VALUE == 500
