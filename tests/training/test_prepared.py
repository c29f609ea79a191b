"""What the loop needs later is ready before its first step."""

import jax
import pytest

from jaxpar.config.command_line import read_config
from jaxpar.monitoring import sinks
from jaxpar.runtime import exit_codes
from jaxpar.training.callbacks.steps import StepMetrics
from tests import fingerprints
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def compiled_in_loop(monkeypatch) -> list[str]:
    """The programs that are compiled after the first step."""
    found: list[str] = []
    in_loop = [False]

    def heard(event: str, seconds: float, **about) -> None:
        if event.endswith("backend_compile_duration") and in_loop[0]:
            found.append(str(about.get("fun_name")))

    report = StepMetrics.after_step

    def first_reported(self, at):
        at = report(self, at)
        in_loop[0] = True
        return at

    monkeypatch.setattr(StepMetrics, "after_step", first_reported)
    jax.monitoring.register_event_duration_secs_listener(heard)
    yield found
    jax.monitoring.unregister_event_duration_listener(heard)


@pytest.fixture(autouse=True)
def programs_of_fingerprints(monkeypatch):
    """They are among what has to be ready."""
    monkeypatch.setattr(fingerprints, "program_of", fingerprints.PROGRAM)


def test_packages_of_sinks_are_imported_ahead(config_file, monkeypatch):
    imported = []
    monkeypatch.setattr(sinks.importlib, "import_module", imported.append)
    cfg = read_config([config_file, "--metrics.prometheus-port", "9000"])
    sinks.import_packages(cfg)
    assert imported == ["tensorboardX.event_file_writer", "prometheus_client"]


SHORT = "--train.num-steps 4 --checkpoint.every 2 --evaluation.every 2"

#: Number of devices, and fields of the config.
RUNS = {
    "one device": (1, ""),
    "sharded": (2, "--parallel.data 2"),
    "reordered layers": (
        4,
        "--parallel.data 2 --parallel.pipeline 2 --parallel.num-microbatches 2 --model.num-layers 4"
        " --parallel.virtual-stages 2 --parallel.zero 1",
    ),
    "unequal stages": (
        2,
        "--parallel.pipeline 2 --parallel.num-microbatches 2 --model.num-layers 3"
        " --parallel.zero 1",
    ),
    "moments on the host": (1, "--optimizer.offload True"),
    "replicas, with a moving average": (
        2,
        "--parallel.replica 2 --guard.replica-check-every 2 --optimizer.ema.decay 0.9"
        " --optimizer.ema.dtype bfloat16",
    ),
}


@pytest.mark.parametrize("name", slow_but(["one device"], RUNS))
def test_nothing_is_compiled_after_the_first_step(name, train_on, config_file, compiled_in_loop):
    number, fields = RUNS[name]
    assert train_on(number, config_file, *SHORT.split(), *fields.split()) == exit_codes.EXIT_OK
    assert compiled_in_loop == []
