"""A real corpus in many parts, by processes that are stopped: every time the same dataset."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest

from jaxpar.data.formats.meta import read_meta
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.progress import PreparationProgress
from jaxpar.data.prepare.text import prepare
from jaxpar.data.tokenizer import train_bpe
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files import json_lines
from tests.data.test_parts import assert_same
from tests.stores.server import server

pytestmark = [pytest.mark.slow, pytest.mark.waits]

ROOT = Path(__file__).resolve().parents[2]

#: Bytes of the corpus: a part of seven takes about two seconds.
CORPUS_BYTES = 20_000_000


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> Path:
    """Source code of Python, in 80 files, and tokenizer.json."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "text").mkdir()
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        text = path.read_bytes().decode("utf-8", "replace")
        found.append(json.dumps({"text": text}) + "\n")
        size += len(text)
        if size > CORPUS_BYTES:
            break
    for number in range(80):
        (folder / "text" / f"{number:02}.jsonl").write_text("".join(found[number::80]))
    (folder / "tokenizer.json").write_text(train_bpe(found[:200], 4000).json_text)
    return folder


def options(code: Path, output: Path | str, **more) -> PrepareOptions:
    tokenizer = str(code / "tokenizer.json")
    told = {"input": (str(code / "text"),), "output": str(output), "tokenizer": tokenizer}
    return PrepareOptions(**told, holdout=0.01, **more)


@pytest.fixture(scope="module")
def one(code) -> Path:
    prepare(options(code, code / "one", workers=1))
    return code / "one"


@pytest.fixture(scope="module")
def seven(code, one) -> Path:
    prepare(options(code, code / "seven", workers=2, parts=7))
    assert_same(one, code / "seven")
    return code / "seven"


@pytest.mark.parametrize("count", [2, 64])
def test_number_of_parts(count, code, one, tmp_path):
    prepare(options(code, tmp_path / "out", workers=2, parts=count))
    assert_same(one, tmp_path / "out")


class Task:
    """A task of an array of jobs."""

    def __init__(self, code: Path, output: Path, number: int):
        self.number = number
        command = f"""exec {sys.executable} -m jaxpar.data prepare --input {code}/text
        --output {output} --tokenizer {code}/tokenizer.json --holdout 0.01 --workers 1
        --parts 7 --part $SLURM_ARRAY_TASK_ID"""
        env = {**os.environ, "SLURM_ARRAY_TASK_ID": str(number)}
        shell = ["sh", "-c", " ".join(command.split())]
        self.process = subprocess.Popen(shell, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)


def test_an_array_of_jobs_that_is_interrupted(code, one, seven, tmp_path):
    """What SIGTERM ends deletes what it has begun; what SIGKILL ends leaves it to the next."""
    out, work = tmp_path / "out", tmp_path / "out.partial"
    killed, stopped = Task(code, out, 5), Task(code, out, 2)
    until = time.monotonic() + 120
    for task, number in ((killed, signal.SIGKILL), (stopped, signal.SIGTERM)):
        while not list(work.glob(f".part-0000{task.number}.*")):
            assert task.process.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        task.process.send_signal(number)
    assert (killed.process.wait(60), stopped.process.wait(60)) == (-9, 143)
    assert not list(work.glob("part-*")) and not out.exists()
    (left,) = work.glob(".part-*")
    assert left.name.startswith(".part-00005.")
    for pair in ((6, 0), (1, 2), (3, 4), (5,)):
        assert not out.exists()
        tasks = [Task(code, out, number) for number in pair]
        assert [task.process.wait(300) for task in tasks] == [0] * len(tasks)
    assert (out / "meta.json").read_text() == (seven / "meta.json").read_text()
    assert_same(one, out)
    assert not work.exists() and not list(out.glob(".*"))
    again = Task(code, out, 3)
    assert again.process.wait(60) == 0


def processes_of_parts(session: str) -> list[int]:
    """The processes of a Ray session that write a part."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::_write"):
                opened = [os.readlink(file) for file in (folder / "fd").iterdir()]
                found += [int(folder.name)] * any(path.startswith(session) for path in opened)
    return found


@pytest.mark.parametrize("at", ["a folder", "an address"])
def test_four_workers_of_ray_of_which_one_is_killed(at, code, one, seven, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    output = str(tmp_path / "out")
    if at == "an address":
        output, more = str(server().address()), {"AWS_ENDPOINT_URL": server().url}
        more |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "any"}
        for name, value in (more | {"XDG_CACHE_HOME": str(tmp_path / "cache")}).items():
            monkeypatch.setenv(name, value)
    killed = list[int]()

    class Progress(PreparationProgress):
        """Kills a process as soon as it writes a part."""

        def advance(self, position: int, total: int, num_tokens: int) -> None:
            if not killed and (busy := processes_of_parts(session)):
                os.kill(busy[0], signal.SIGKILL)
                killed.append(busy[0])

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory(dir="/tmp") as session:  # a path of a socket is short
        ray.init(num_cpus=4, log_to_driver=False, include_dashboard=False, _temp_dir=session)
        try:
            made = prepare(options(code, output, parts=7, engine="ray"), Progress())
        finally:
            ray.shutdown()
    assert killed and made == read_meta(seven)
    if at == "a folder":
        assert (tmp_path / "out" / "meta.json").read_text() == (seven / "meta.json").read_text()
        assert_same(one, tmp_path / "out")


def test_a_run_goes_on_with_the_same_losses(train_on, config_file, text_file, tmp_path):
    """It began on one file, and resumes on parts of the same data."""
    lines = text_file.read_text().splitlines(keepends=True)
    for number in range(5):
        (tmp_path / f"{number}.jsonl").write_text("".join(lines[number::5]))
    inputs = tuple(str(tmp_path / f"{number}.jsonl") for number in range(5))
    for count in (1, 3):
        made = PrepareOptions(
            input=inputs, output=str(tmp_path / f"{count}"), holdout=0.2, parts=count
        )
        prepare(made)
    assert len(read_meta(tmp_path / "3").splits["train"].parts) == 3

    def train(name: str, data: int, steps: int) -> list[float]:
        run = tmp_path / name
        words = f"--run.dir {run} --data.path {tmp_path / str(data)} --train.num-steps {steps}"
        more = "--checkpoint.every 6 --optimizer.schedule constant --optimizer.warmup-steps 1"
        assert train_on(1, config_file, *words.split(), *more.split()) == exit_codes.EXIT_OK
        return [r["loss"] for r in json_lines.read(run / "metrics.jsonl") if "loss" in r]

    whole = train("whole", 1, 12)
    assert len(whole) == 12 and train("paused", 1, 6) == whole[:6]
    assert train("paused", 3, 12) == whole
