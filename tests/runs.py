"""Fixtures of every test: a tiny config, a little text prepared for it, and runs of it.

The rates of the tiny config are an input of its step, so that runs of all lengths share one. The
config of `write_ranks` compiles its schedule, as is the default.
"""

import contextlib
import functools
import signal
from pathlib import Path

import jax
import pytest

from jaxpar.commands import call
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.text import prepare
from jaxpar.runtime import exit_codes
from jaxpar.sharding.mesh import make_mesh
from jaxpar.training import run
from tests import ranks
from tests.fingerprints import quickly_computed
from tests.kept_steps import steps_kept
from tests.weights import as_programs_do, quickly_made

CONFIG = """
from jaxpar.config import *

def get_config():
    return Config(
        run=RunConfig(dir={run!r}),
        data=DataConfig(path={data!r}, seq_len=32),
        model=Model(
            d_model=32,
            vocab_size=272,
            layers=[Layer("layers", Attention(num_heads=4, num_kv_heads=2, head_dim=8), Glu(64))]
            * 2,
        ),
        compute=ComputeConfig(dtype="float32"),
        train=TrainConfig(num_steps=120, global_batch_size=8, log_every=1),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=10, schedule_as_input=True),
        checkpoint=CheckpointConfig(every=40),
        evaluation=EvaluationConfig(every=60, num_batches=2),
    )
"""


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents of repetitive text."""
    path = tmp_path_factory.mktemp("text") / "verses.jsonl"
    ranks.write_text(path)
    return path


@pytest.fixture(scope="session")
def dataset(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as bytes, a fifth held out."""
    output = tmp_path_factory.mktemp("prepared") / "verses"
    prepare(PrepareOptions(input=(str(text_file),), output=str(output), holdout=0.2))
    return output


@pytest.fixture(scope="session")
def write_config(dataset: Path):
    """(folder) -> a config file in it; its run goes to `folder/run`."""

    def write(folder: Path) -> str:
        file = folder / "tiny.py"
        file.write_text(CONFIG.format(run=str(folder / "run"), data=str(dataset)))
        return str(file)

    return write


@pytest.fixture
def config_file(write_config, tmp_path: Path) -> str:
    """A config file whose run goes to tmp_path/run."""
    return write_config(tmp_path)


@pytest.fixture(scope="session")
def write_ranks(dataset):
    """(folder) -> a config file in it; its run goes to `folder/run`."""

    return functools.partial(ranks.write_config, data=dataset)


@contextlib.contextmanager
def devices_and_handlers(number: int):
    with pytest.MonkeyPatch.context() as patch:
        mesh = functools.partial(make_mesh, devices=jax.devices()[:number])
        patch.setattr(run, "make_mesh", mesh)
        patch.setattr(jax, "device_count", lambda: number)
        handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            with quickly_made(), quickly_computed(), steps_kept():
                yield
        finally:
            for n, handler in handlers.items():
                signal.signal(n, handler)


@pytest.fixture(scope="session")
def only_devices():
    """(number) -> a context in which a run takes so many of this process's devices.

    Initial weights are those of tests/weights.py, and fingerprints of tests/fingerprints.py,
    with the bits that other processes make. Steps are those of tests/kept_steps.py. Afterwards the
    process has its own signal handlers again.
    """
    return devices_and_handlers


@pytest.fixture(scope="session")
def train_on(only_devices):
    """(number of devices, command line) -> the exit code of a run inside this process."""

    def on(number: int, *args: str) -> int:
        with only_devices(number):
            return call("train", args)

    return on


@pytest.fixture(scope="session")
def whole(train_on, write_ranks, tmp_path_factory) -> Path:
    """The run of `write_ranks`, in one process on four devices. Tests must not write to it."""
    folder = tmp_path_factory.mktemp("whole")
    with as_programs_do():
        assert train_on(4, write_ranks(folder)) == exit_codes.EXIT_OK
    return folder / "run"


@pytest.fixture(scope="session")
def finished(train_on, write_config, tmp_path_factory) -> Path:
    """A run of 120 steps on two devices, saved every 40. Tests must not write to it."""
    folder = tmp_path_factory.mktemp("finished")
    with as_programs_do():
        assert train_on(2, write_config(folder)) == exit_codes.EXIT_OK
    return folder / "run"
