"""Two processes whose hosts have folders of their own, which do not contain the same."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.data.options import PreparePairsOptions
from jaxpar.data.prepare.records_command import prepare_records
from jaxpar.features.dpo.reference import reference_file
from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes.sources import LAUNCHED
from tests import ranks

pytestmark = [pytest.mark.waits, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3


@pytest.fixture
def hosts(tmp_path) -> list[Path]:
    """The working folders of two hosts. Relative paths are on their own disks."""
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.fixture
def train_on_hosts(write_ranks, tmp_path, hosts):
    """(flags) -> what each process of a run said, which took its steps. It saves no checkpoint,
    since those of several processes need a common folder."""
    config = write_ranks(tmp_path)
    none = "--checkpoint.every 0 --evaluation.every 0 --run.cpu-devices 2 --run.dir run".split()

    def train(*flags: str) -> list[str]:
        coordinator, started = f"127.0.0.1:{ranks.free_port()}", []
        words = [*none, "--train.num-steps", str(STEPS), *flags]
        for host, folder in enumerate(hosts):
            place = dict(zip(LAUNCHED, (coordinator, "2", str(host)), strict=True))
            command = [sys.executable, "-m", "jaxpar.train", config, *words]
            with open(folder / "out", "w") as out:
                env = ranks.environment(**place)
                started.append(
                    subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=folder)
                )
        try:
            done = [ranks.finish(process, ranks.HANG)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        said = [(folder / "out").read_text() for folder in hosts]
        assert done == [exit_codes.EXIT_OK] * 2, said[0][-3000:] + said[1][-3000:]
        return said

    return train


def records(folder: Path, name: str) -> list[float]:
    """A metric of the run of a host, by step."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [line[name] for line in map(json.loads, lines) if name in line]


def test_a_reference_that_one_process_has_is_computed_by_all(hosts, train_on_hosts, tmp_path):
    """Scoring it is a program of all processes: one that did without would leave the others."""
    pairs = [{"prompt": f"{n}?", "chosen": f"{n}.", "rejected": f"{n}!"} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    files = {"input": (str(tmp_path / "pairs.jsonl"),), "output": str(tmp_path / "pairs")}
    prepare_records(PreparePairsOptions(**files, tokenizer="bytes", holdout=0.2))
    flags = ["--data.path", files["output"], "--data.seq-len", "64", "--dpo.beta", "0.2"]
    assert "log probabilities" in train_on_hosts(*flags)[0]
    losses, there = records(hosts[0], "loss"), [reference_file(h / "run", "train") for h in hosts]
    assert [file.exists() for file in there] == [True, False] and len(losses) == STEPS
    kept = there[0].read_bytes()
    for folder in hosts:
        shutil.rmtree(folder / "run", ignore_errors=True)
    there[0].parent.mkdir()
    there[0].write_bytes(kept)
    assert "log probabilities" in train_on_hosts(*flags)[0]
    assert records(hosts[0], "loss") == losses


def test_a_teacher_that_goes_on_meanwhile_is_that_of_the_first_process(
    hosts, train_on_hosts, finished
):
    flags = ["--distill.teacher", "teacher", "--distill.top-k", "4"]
    for folder in hosts:
        shutil.copytree(finished, folder / "teacher")
        for later in (80, 120):
            shutil.rmtree(folder / f"teacher/checkpoints/{later}")
    assert "teacher, step 40" in train_on_hosts(*flags)[0]
    wanted = [records(hosts[0], name) for name in ("loss", "distill_loss")]
    for folder in hosts:
        shutil.rmtree(folder / "run", ignore_errors=True)
    for later in (80, 120):  # the second process looks when they have been saved
        name = f"checkpoints/{later}"
        shutil.copytree(finished / name, hosts[1] / "teacher" / name)
    assert "teacher, step 40" in train_on_hosts(*flags)[0]
    assert [records(hosts[0], name) for name in ("loss", "distill_loss")] == wanted
    assert len(wanted[1]) == STEPS
