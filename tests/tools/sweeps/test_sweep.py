"""A sweep runs every point of a grid once, and continues; with a stand-in for jaxpar.train."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.config.config_file import load_config
from jaxpar.runtime import exit_codes
from jaxpar.tools.sweeps import running
from jaxpar.tools.sweeps.grid import MAX_RUNS, points_of
from jaxpar.tools.sweeps.running import FILE
from tests.ranks import wait_for

pytestmark = pytest.mark.waits

ROOT = Path(__file__).resolve().parents[3]
LR = "optimizer.learning_rate"

#: Writes what a run writes: its files, and a loss that is lower for a higher learning rate.
STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
from jaxpar.config.command_line import read_config
from jaxpar.config.serialize import to_json
cfg = read_config(sys.argv[1:])
rate, folder, last = cfg.optimizer.learning_rate, Path(cfg.run.dir), cfg.train.num_steps
code = int(os.environ.get(f"CODE_OF_{rate}", "0"))
last = 1 if code else last
(folder / "checkpoints" / str(last)).mkdir(parents=True, exist_ok=True)
(folder / "config.json").write_text(to_json(cfg))
with open(folder / "metrics.jsonl", "a") as file:
    for step in range(1, last + 1):
        file.write(json.dumps({"step": step, "loss": 5 - 100 * rate}) + "\\n")
with open(folder / "events.jsonl", "a") as file:
    there = Path(os.environ["JAX_COMPILATION_CACHE_DIR"], str(cfg.optimizer.schedule_as_input))
    event = {"event": "compiled", "attempt": 1, "age": 1.0, "time": 1.0}
    file.write(json.dumps(event | {"from_cache": there.exists()}) + "\\n")
there.mkdir(parents=True, exist_ok=True)
print("the last line", flush=True)
if code == 75:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    (folder / "waits").touch()
    time.sleep(1000)
sys.exit(code)
"""


@pytest.fixture
def swept(tmp_path, monkeypatch, capfd):
    """(options) -> exit code and output of a sweep in tmp_path, by the stand-in."""
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    start = running.children.start

    def instead(command, env, log):
        assert list(command[:3]) == [sys.executable, "-m", "jaxpar.train"]
        return start([sys.executable, str(program), *command[3:]], env, log)

    monkeypatch.setattr(running.children, "start", instead)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)

    def run(*options: str) -> tuple[int, str]:
        args = ["quickstart", "--folder", str(tmp_path / "sweep"), "--train.num-steps=3", *options]
        code = call("sweep", args)
        return code, capfd.readouterr().out

    return run


def test_runs_are_ranked_and_the_same_command_has_nothing_to_do(swept, tmp_path):
    code, said = swept("--grid", f"{LR}=1e-3,3e-3,1e-2")
    assert code == exit_codes.EXIT_OK
    assert "compiled   the train step once, and read from the cache 2 times" in said
    names = re.findall(r"sweep/learning_rate=(\S+)  ", said)
    assert names == ["0.01", "0.003", "0.001"]
    assert f"best       --{LR}=1e-2" in said
    assert (tmp_path / "sweep" / "report.html").read_bytes().startswith(b"<!doctype html>")
    assert "the last line" in (tmp_path / "sweep" / "learning_rate=0.001.log").read_text()
    code, said = swept("--grid", f"{LR}=1e-3,3e-3,1e-2,2e-2")
    assert code == exit_codes.EXIT_OK and said.count("finished before, skipped") == 3
    assert "run 4/4  learning_rate=0.02: finished after" in said


@pytest.mark.slow
def test_other_fields_are_not_shared(swept, tmp_path):
    code, said = swept("--grid", "optimizer.weight_decay=0,0.1", f"{LR}=1e-3")
    assert code == exit_codes.EXIT_OK and "weight_decay=0.1,learning_rate=0.001: finished" in said
    config = tmp_path / "sweep" / "weight_decay=0.1,learning_rate=0.001" / "config.json"
    assert '"schedule_as_input": false' in config.read_text()


@pytest.mark.slow
def test_a_run_that_diverges_or_fails_does_not_end_the_sweep(swept, monkeypatch):
    monkeypatch.setenv("CODE_OF_0.002", "17")
    monkeypatch.setenv("CODE_OF_0.001", "1")
    grid = "--grid", f"{LR}=1e-3,2e-3,3e-3"
    code, said = swept(*grid)
    assert code == exit_codes.EXIT_ERROR
    assert "learning_rate=0.001: failed with code 1" in said and "0.002: diverged" in said
    assert "learning_rate=0.003: finished" in said
    assert "failed: learning_rate=0.001; the same command tries again" in said
    monkeypatch.delenv("CODE_OF_0.001")
    code, said = swept(*grid)
    assert code == exit_codes.EXIT_OK
    assert "0.001: finished after" in said and "0.002: diverged before, skipped" in said


def test_a_signal_ends_the_run_and_the_sweep(swept, monkeypatch, tmp_path):
    monkeypatch.setenv("CODE_OF_0.001", "75")

    def stop() -> None:
        wait_for(lambda: list(tmp_path.glob("sweep/*/waits")))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    before = signal.getsignal(signal.SIGTERM)
    code, said = swept("--grid", f"{LR}=1e-3,2e-3")
    assert code == exit_codes.EXIT_PREEMPTED
    assert re.search(r"0\.001: (stopped|failed with code 143) after", said) and "0.002" not in said
    assert "SIGTERM: stopped; the same command continues" in said
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_folder_of_another_sweep_is_refused(swept):
    swept("--grid", f"{LR}=1e-3")
    with pytest.raises(ConfigError, match=r"another config, with train\.seed 0"):
        swept("--grid", f"{LR}=1e-3", "--train.seed=1")
    with pytest.raises(ConfigError, match=rf"has a sweep of {LR}"):
        swept("--grid", f"{LR}=1e-3", "train.seed=1")


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        (
            [f"{LR}=1e-3,x,-1", "train.sed=1", f"{LR}=1", "run.dir=a,b", "train.seed=", "foo"],
            [
                r"optimizer\.learning_rate = 'x' must be",
                r"learning_rate = -1\.0 must be above 0",
                r"train\.sed is not a field",
                f"{LR} comes twice",
                r"run\.dir cannot be swept",
                r"train\.seed has an empty value",
                r"'foo' is not section\.field=value,value",
            ],
        ),
        ([f"{LR}=1e-3,0.001"], [r"two runs with the folder learning_rate=0\.001"]),
        ([f"train.seed={','.join(map(str, range(MAX_RUNS + 1)))}"], ["has 1,001 points"]),
        (
            ["model.layers.mixer.num_heads=3", "model.d_model=128,130"],
            [r"model\.layers\.mixer\.num_heads = 3 must be divisible by num_kv"],
        ),
    ],
)
def test_a_bad_grid_is_one_error(grid, told):
    with pytest.raises(ConfigError) as error:
        points_of(load_config("quickstart"), grid)
    assert error.value.field == "--grid"
    for text in told:
        assert re.search(text, error.value.rule), (text, error.value.rule)


def test_names_are_folders():
    grid = ["model.layers.feed_forward.d_ff=256", "data.path=data/a b,c", "model.d_model=128"]
    points = points_of(load_config("quickstart"), grid)
    assert points[0].name == "d_ff=256,path=data_a_b,d_model=128"
    d_ff = {"model.layers.feed_forward.d_ff": "256"}
    assert points[1].values == d_ff | {"data.path": "c", "model.d_model": "128"}
    starred = points_of(load_config("quickstart"), ["model.*.feed-forward.d-ff=256,512"])
    assert [point.name for point in starred] == ["d_ff=256", "d_ff=512"]
    assert [point.cfg.model.layers[-1].feed_forward.d_ff for point in starred] == [256, 512]


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        ("train.z_loss_schedule=0:1e-3,[0:1e-3,9:0]", ["0_0.001", "0_0.001,9_0.0"]),
        ("data.mixture=[a:1,b:2],[a:2,b:1]", ["a_1.0,b_2.0", "a_2.0,b_1.0"]),
        ("parallel.remat=dots,[qk],[qk,qkv]", ["dots", "_qk_", "qk,qkv"]),
    ],
)
def test_lists_of_several_items_are_in_brackets(grid, names):
    points = points_of(load_config("quickstart"), [grid])
    field = grid.partition("=")[0].rpartition(".")[2]
    assert [point.name for point in points] == [f"{field}={name}" for name in names]


@pytest.mark.parametrize("option", [(), ("--grid",), ("--grid", f"{LR}=1", f"--{LR}=2")])
def test_what_is_missing_or_comes_twice(option):
    with pytest.raises(ConfigError, match=r"grid|learning_rate"):
        call("sweep", ["quickstart", *option])


@pytest.mark.parametrize("name", ["sweep", "a b", 'it\'s $(touch x) `y` "z" 100%a #1', "-x"])
def test_a_slurm_array_runs_each_point(tmp_path, capsys, name):
    """The script, with programs in place of Slurm's."""
    folder = tmp_path / name
    args = ["quickstart", "--slurm", "--folder", str(folder)]
    args += ["--grid", f"{LR}=1e-3,2e-3", "data.path=a b"]
    assert call("sweep", [*args, "--train.num-steps=3"]) == exit_codes.EXIT_OK
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-1\n" in script and folder.is_dir()
    output = next(line for line in script.splitlines() if line.startswith("#SBATCH --output="))
    pattern = shlex.split(output.removeprefix("#SBATCH "))
    assert pattern == [f"--output={str(folder).replace('%', '%%')}/slurm-%a.out"]
    srun = "printf '%s\\n' \"$@\"; exit 75"
    for program, text in (("srun", srun), ("scontrol", 'echo scontrol "$@"')):
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env |= {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", script], env=env, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 75 and not done.stderr and not (tmp_path / "x").exists()
    *ran, requeued = done.stdout.splitlines()
    assert requeued == "scontrol requeue 7_1"
    assert ran[-6:] == [
        "jaxpar.train",
        "quickstart",
        "--train.num-steps=3",
        f"--{LR}=2e-3",
        "--data.path=a b",
        f"--run.dir={folder}/learning_rate=0.002,path=a_b",
    ]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--folder", "a\nb"], r"--folder = 'a\\nb': has a control character"),
        (["--folder", "a\x1bb"], "has a control character"),
        (["--folder", "a\\b"], "has a backslash"),
        (["--data.path", "a\n#SBATCH --uid=0"], "has a control character"),
    ],
)
def test_what_a_batch_script_cannot_have_is_refused(tmp_path, monkeypatch, more, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=told):
        call("sweep", ["quickstart", "--slurm", "--grid", f"{LR}=1e-3", *more])
    assert not list(tmp_path.iterdir())


MISSHAPEN = [
    b"",
    b"5",
    b"[" * 100_000,
    b'{"axes": 5, "config": {}}',
    b'{"axes": ["train.seed"], "config": null}',
    b'{"axes": ["train.seed"], "config": {"train": 1}}',
    b'{"axes": [], "config": {}, "ended": []}',
    b'{"axes": [], "config": {}, "ended": {"x": "y"}}',
    b'{"axes": [], "config": {}, "ended": {"x": 1e400}}',
    b'{"axes": [], "config": {}, "version": 2}',
    b'{"config": {}}',
]


@pytest.mark.parametrize("content", MISSHAPEN)
def test_a_sweep_file_of_another_form_is_refused(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    args = ["quickstart", "--folder", str(tmp_path), "--grid", f"{LR}=1e-3"]
    with pytest.raises(ConfigError, match=rf"has a {FILE} that cannot be used: it ") as error:
        call("sweep", args)
    assert "\n" not in str(error.value) and (tmp_path / FILE).read_bytes() == content


@pytest.mark.slow
def test_three_learning_rates_compile_one_step(write_config, tmp_path):
    """Counted by the events of the runs, and by the steps in the cache."""
    options = [write_config(tmp_path), "--folder", "sweep", "--train.num-steps=5"]
    options += ["--evaluation.every=0", "--grid", f"{LR}=1e-3,3e-3,1e-2"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    env |= {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar.sweep", *options],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": finished after") == 3
    assert "compiled   the train step once, and read from the cache 2 times" in done.stdout
    assert len(list((tmp_path / "sweep" / "compiled").glob("jit_train_step-*-cache"))) == 1
