"""Data sources with `next`: where a run stops, goes back, or leaves out batches, so do they."""

import functools
import json
import shutil
from pathlib import Path

import jax
import pytest

from jaxpar.checkpoint.saved import METADATA, read_saved, saved_steps
from jaxpar.config import ConfigError
from jaxpar.data.own import DataSource, Positions
from jaxpar.data.skips import read_skipped
from jaxpar.memory_checkpoint.places import FOLDER
from jaxpar.memory_checkpoint.writing import MemoryCheckpointer
from jaxpar.runtime import exit_codes
from tests import ranks
from tests.memory_checkpoint.hosts import folders_of
from tests.training.test_guards import FLAGS, NOISE, noisy_batches

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

#: What the tests' config file begins with. A batch of `Walk` depends on all before it; `AsFunction`
#: has the same ones, by number.
CODE = '''
import numpy as np
import jax

import jaxpar
from jaxpar.extend import DataSource


class Walk(DataSource):
    def start(self, seed):
        return {"batch": 0, "rng": np.random.default_rng(seed).bit_generator.state}

    def next(self, state, shape):
        rng = np.random.default_rng()
        rng.bit_generator.state = state["rng"]
        begin = rng.integers(0, 16, (shape[0], 1))
        state["batch"] += 1  # in place
        state["rng"] = rng.bit_generator.state
        return 3 * (begin + np.arange(shape[1] + 1)) % 16, state


class AsFunction(DataSource):
    def __call__(self, seed, step, shape):
        state = Walk().start(seed)
        for _ in range(step + 1):
            text, state = Walk().next(state, shape)
        return text


class Fails(jaxpar.Callback):
    """Fails as a device does: nothing is saved."""

    step: int

    def after_step(self, run, own):
        if run.step == self.step:
            raise jax.errors.JaxRuntimeError("a fault of this test")
'''
WORDS = "--train.num-steps 12 --checkpoint.every 4 --evaluation.every 0 --data.prefetch 3".split()


def with_source(file: str, plain: str, source="Walk()", code="", callbacks="") -> str:
    """Write a config file with a source, its code, and callbacks. Returns its name."""
    text = plain.replace("seq_len=32", f"seq_len=32, source={source}")
    text = text.replace("log_every=1", f"log_every=1, callbacks=({callbacks})")
    Path(file).write_text(CODE + code + text, "utf-8")
    return file


@pytest.fixture
def config_with(config_file):
    """(source, code of it, callbacks) -> a config file with them."""
    return functools.partial(with_source, config_file, Path(config_file).read_text("utf-8"))


def position(run: Path, step: int | None = None) -> dict:
    """What a checkpoint has of the source."""
    return json.loads(read_saved(run, step).position)


@pytest.fixture(scope="module")
def walked(train_on, write_config, tmp_path_factory) -> Path:
    """A run of 12 steps on two devices. Tests must not write to it."""
    file = write_config(tmp_path_factory.mktemp("walked"))
    with_source(file, Path(file).read_text("utf-8"))
    assert train_on(2, file, *WORDS) == exit_codes.EXIT_OK
    return Path(file).parent / "run"


@pytest.fixture
def uninterrupted(walked, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(walked, tmp_path / "whole")


def test_a_checkpoint_has_the_state_after_its_steps(walked):
    for step in (4, 8, 12):
        found = position(walked, step)
        assert found["batch"] == found["state"]["batch"] == step


def test_a_killed_run_resumes_bit_for_bit_on_another_mesh(
    train_on, config_with, uninterrupted, tmp_path, capsys
):
    """On expert ranks in place of data ranks, which add the same numbers."""
    run = tmp_path / "run"
    with pytest.raises(jax.errors.JaxRuntimeError):
        train_on(2, config_with(callbacks="Fails(step=7),"), *WORDS)
    mesh = ["--parallel.expert", "2", "--parallel.data", "1"]
    assert train_on(2, config_with(), *WORDS, *mesh) == exit_codes.EXIT_OK
    assert "restored step 4 from the checkpoint" in capsys.readouterr().out
    ranks.assert_same_records(run, uninterrupted)
    assert position(run) == position(uninterrupted)


@pytest.mark.slow  # quicker: a killed run, above
def test_on_a_mesh_with_other_sums_it_is_the_function(train_on, config_with, tmp_path):
    """Both are killed, and go on on tensor ranks."""
    runs = [tmp_path / "of-next", tmp_path / "of-function"]
    for source, run in zip(("Walk()", "AsFunction()"), runs, strict=True):
        words = [*WORDS, "--run.dir", str(run)]
        with pytest.raises(jax.errors.JaxRuntimeError):
            train_on(2, config_with(source, callbacks="Fails(step=7),"), *words)
        mesh = ["--parallel.tensor", "2"]
        assert train_on(4, config_with(source), *words, *mesh) == exit_codes.EXIT_OK
    ranks.assert_same_records(*runs)


@pytest.mark.slow
def test_a_resumed_run_does_not_read_from_the_start(train_on, config_with):
    assert train_on(2, config_with(), *WORDS, "--train.num-steps", "4") == exit_codes.EXIT_OK
    code = "\nWalk.start = lambda self, seed: 1 / 0\n"
    assert train_on(2, config_with(code=code), *WORDS) == exit_codes.EXIT_OK


@pytest.mark.slow  # quicker: a killed run, above
def test_it_is_the_function_with_the_same_batches(train_on, config_with, uninterrupted, tmp_path):
    assert train_on(2, config_with("AsFunction()"), *WORDS) == exit_codes.EXIT_OK
    ranks.assert_same_records(tmp_path / "run", uninterrupted)
    assert read_saved(tmp_path / "run").position == ""


@pytest.mark.slow  # quicker: test_callbacks.py, whose state is kept there too
def test_a_copy_in_memory_has_it(train_on, config_with, uninterrupted, tmp_path, monkeypatch):
    (memory,) = folders_of(tmp_path / "memory", 1)
    monkeypatch.setenv(FOLDER, str(memory))
    due = MemoryCheckpointer.due

    def patient(self, step: int) -> bool:  # a step takes as long as a copy: none is left out
        self.wait()
        return due(self, step)

    monkeypatch.setattr(MemoryCheckpointer, "due", patient)
    words = [*WORDS, "--checkpoint.every", "12", "--checkpoint.memory.every", "3"]
    with pytest.raises(jax.errors.JaxRuntimeError):
        train_on(2, config_with(callbacks="Fails(step=8),"), *words)
    assert train_on(2, config_with(), *words) == exit_codes.EXIT_OK
    ranks.assert_same_records(tmp_path / "run", uninterrupted)


@pytest.mark.slow  # quicker: a killed run
def test_a_source_that_fails_is_resumed_where_it_failed(
    train_on, config_with, uninterrupted, tmp_path
):
    code = """
makes = Walk.next

def fails(self, state, shape):
    if state["batch"] == 7:
        raise OSError("a fault of this test")
    return makes(self, state, shape)

Walk.next = fails
"""
    with pytest.raises(OSError, match="a fault of this test"):
        train_on(2, config_with(code=code), *WORDS)
    found = position(tmp_path / "run")  # saved before the run ends
    assert found["batch"] == found["state"]["batch"] == 7
    assert train_on(2, config_with(), *WORDS) == exit_codes.EXIT_OK
    ranks.assert_same_records(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_an_earlier_checkpoint_has_its_own(train_on, config_with, uninterrupted, tmp_path):
    """The arrays of the latest are damaged, which shows as they are read."""
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    for file in (run / "checkpoints" / "12").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 255
            file.write_bytes(content)
    shutil.rmtree(uninterrupted / "checkpoints" / "12")
    for folder in (run, uninterrupted):
        more = ["--train.num-steps", "16", "--run.dir", str(folder)]
        assert train_on(2, config_with(), *WORDS, *more) == exit_codes.EXIT_OK
        assert position(folder)["state"]["batch"] == 16
    assert (run / "damaged" / "12").is_dir()
    ranks.assert_same_records(run, uninterrupted)


@pytest.mark.slow  # quicker: test_guards.py
def test_a_rewind_goes_back_and_skipped_batches_are_drawn(train_on, config_with, tmp_path):
    """As with the function of the batch's number, in the same runs."""
    flags = [*FLAGS, "--guard.spike", "rewind"]
    runs = [tmp_path / "of-next", tmp_path / "of-function"]
    for source, run in zip(("Walk()", "AsFunction()"), runs, strict=True):
        with noisy_batches({NOISE}):
            code = train_on(2, config_with(source), *flags, "--run.dir", str(run))
        assert code == exit_codes.EXIT_OK
    found = runs[0]
    assert read_skipped(found).ranges == ((NOISE - 1, 2),)
    ranks.assert_same_records(*runs)
    assert position(found, 40)["state"]["batch"] == position(found, 40)["batch"] == 40
    assert position(found, 60)["state"]["batch"] == position(found, 60)["batch"] == 62
    # The checkpoint after the skipped batches goes on as one of a run without a break.
    for source, run in zip(("Walk()", "AsFunction()"), runs, strict=True):
        more = ["--run.dir", str(run), "--train.num-steps", "64"]
        assert train_on(2, config_with(source), *flags, *more) == exit_codes.EXIT_OK
    ranks.assert_same_records(*runs)


@pytest.mark.slow
def test_a_rewind_before_the_first_checkpoint_starts_over(train_on, config_with, tmp_path):
    flags = [*FLAGS, "--guard.spike", "rewind", "--checkpoint.every", "48"]
    with noisy_batches({NOISE}):
        assert train_on(2, config_with(), *flags) == exit_codes.EXIT_OK
    assert position(tmp_path / "run", 48)["state"]["batch"] == 50


def test_a_checkpoint_without_it_is_refused(train_on, config_with, uninterrupted):
    """Of the same class, which has become one with `next`, or is none any more."""
    words = [*WORDS, "--run.dir", str(uninterrupted), "--train.num-steps", "14"]
    function = "\nclass Walk(DataSource):\n    __call__ = lambda *_: np.ones((8, 33), int)\n"
    message = r"data\.source = 'Walk': defines __call__, but the checkpoint of step 12 is of one "
    with pytest.raises(ConfigError, match=message):
        train_on(2, config_with(code=function), *words)
    shutil.rmtree(uninterrupted)
    assert train_on(2, config_with(code=function), *words) == exit_codes.EXIT_OK
    message = r"data\.source = 'Walk': defines next, but the checkpoint of step 14 has no state"
    with pytest.raises(ConfigError, match=message):
        train_on(2, config_with(), *words, "--train.num-steps", "16")


def test_a_state_that_cannot_be_read_is_refused(train_on, config_with, uninterrupted):
    from jaxpar.checkpoint import integrity

    folder = uninterrupted / "checkpoints" / "12"
    about = json.loads((folder / METADATA).read_text("utf-8"))
    for text in ("{", "[]", '{"batch": -1, "state": 0}', '{"batch": 1}', "[" * 10_000):
        own = {k: v for k, v in about["custom_metadata"].items() if k != integrity.SEAL}
        sealed = about | {"custom_metadata": integrity.seal(own | {"position": text})}
        (folder / METADATA).write_text(json.dumps(sealed), "utf-8")
        integrity.write_file_list(folder)
        words = [*WORDS, "--run.dir", str(uninterrupted), "--train.num-steps", "14"]
        with pytest.raises(ConfigError, match="step 12 has a state that cannot be read") as error:
            train_on(2, config_with(), *words)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("np.arange(3)", r"next\(\) returns a state that is not JSON \(Object of type ndarray"),
        ('{"at": (1, 2)}', r"next\(\) returns a state that is not JSON \(it is read as another"),
        ("{1: 2}", r"next\(\) returns a state that is not JSON \(it is read as another"),
        ('float("nan")', r"next\(\) returns a state that is not JSON \(Out of range float"),
        ('"x" * 10**6', r"next\(\) returns a state of 1,000,002 bytes as JSON, above 1,000,000"),
    ],
)
def test_a_state_is_json_of_up_to_a_megabyte(state, message, train_on, config_with, tmp_path):
    code = f"""
class Wrong(Walk):
    def next(self, state, shape):
        return super().next(state, shape)[0], {state}
"""
    with pytest.raises(ConfigError, match=rf"data\.source = 'Wrong': {message}.*Fix: ") as error:
        train_on(1, config_with("Wrong()", code), *WORDS)
    assert "\n" not in str(error.value)
    assert not saved_steps(tmp_path / "run")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "class Wrong(Walk):\n    __call__ = AsFunction.__call__",
            "defines __call__ and start and",
        ),
        ("class Wrong(DataSource):\n    next = Walk.next", "defines next.*define __call__ alone"),
        ("class Wrong(DataSource):\n    pass", "defines no batches"),
        ("class Wrong(Walk):\n    next = lambda *_: 3", r"next\(\) returns a int.*return a batch"),
        (
            "class Wrong(Walk):\n    start = lambda *_: {3}",
            r"start\(\) returns a state that is not",
        ),
    ],
)
def test_other_mistakes(code, message, train_on, config_with):
    with pytest.raises(ConfigError, match=rf"data\.source = 'Wrong': {message}"):
        train_on(1, config_with("Wrong()", f"\n{code}\n"), *WORDS)


@pytest.mark.waits
@pytest.mark.slow
def test_another_number_of_processes(train_on, write_ranks, tmp_path):
    """Two processes, of which one is killed; then one. Bit for bit a run of one process."""
    file = Path(write_ranks(tmp_path))
    text = file.read_text("utf-8").replace("seq_len=16", "seq_len=16, source=Walk()")
    file.write_text(CODE + text, "utf-8")
    run, whole = tmp_path / "run", tmp_path / "whole"
    words = [str(file), "--train.num-steps", "14"]
    assert train_on(4, *words, "--run.dir", str(whole)) == exit_codes.EXIT_OK
    process = ranks.launch(2, 2, "--restarts", "0", "--", *words, FAULT="1 12 SIGKILL")
    ended, said = ranks.finish(process)
    assert ended and "killed by SIGKILL" in said, said[-3000:]
    assert saved_steps(run)[-1] in (5, 10)  # the last may not be complete
    assert train_on(4, *words) == exit_codes.EXIT_OK
    assert ranks.losses_of(run) == ranks.losses_of(whole)
    assert position(run) == position(whole)


def test_each_batch_is_made_once_in_order_and_any_can_be_made():
    calls: list[int] = []

    class Count(DataSource):
        def start(self, seed):
            return seed

        def next(self, state, shape):
            calls.append(state)
            return state, state + 1

    source = Positions(Count(), 100, lambda batch: (1, 1), most=4)
    for batch in range(20):  # two ahead, of steps that are saved
        assert source.made(batch) == 100 + batch
        assert json.loads(source.before(max(batch - 2, 0)))["state"] == 100 + max(batch - 2, 0)
    assert calls == list(range(100, 120))
    assert [source.made(batch) for batch in (30, 3, 0)] == [130, 103, 100]
    source.go_on('{"batch": 50, "state": 7}')
    assert source.made(52) == 9 and source.before(50) == '{"batch": 50, "state": 7}'
