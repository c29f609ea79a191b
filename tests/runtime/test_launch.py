"""Starting processes, ending them, the run folder's lock, and what a failure is."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpar.commands import call, read
from jaxpar.config import Config, ConfigError, replace
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files.run_lock import RunLock, RunLocked, create_in
from jaxpar.runtime.gpus import visible
from jaxpar.runtime.gpus import xla_flags as gpus_xla_flags
from jaxpar.runtime.processes import children
from jaxpar.runtime.processes import launcher as processes_launcher
from jaxpar.runtime.processes.addresses import FreePort
from jaxpar.runtime.processes.children import Failure, LastWords, failure_of
from jaxpar.runtime.processes.launch_options import LaunchOptions
from jaxpar.training import loop, start
from tests.ranks import alive, wait_for

pytestmark = pytest.mark.waits

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, *args: str) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *args]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_a_reserved_port_is_nobody_elses_but_the_coordinators():
    with contextlib.ExitStack() as held:
        ports = [
            held.enter_context(contextlib.closing(FreePort("127.0.0.1"))).number for _ in range(200)
        ]
        assert len(set(ports)) == len(ports)
        taken, like_grpc = (held.enter_context(socket.socket()) for _ in range(2))
        with pytest.raises(OSError):
            taken.bind(("127.0.0.1", ports[0]))
        like_grpc.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        like_grpc.bind(("127.0.0.1", ports[0]))
        like_grpc.listen()
        held.enter_context(socket.create_connection(("127.0.0.1", ports[0]), timeout=10))


# -------------------------------------------------------------------------------- the lock

HOLDER = """
import sys, time
from pathlib import Path
from jaxpar.runtime.files.run_lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


def test_a_folder_has_one_writer_and_sigkill_leaves_no_stale_lock(tmp_path):
    run = tmp_path / "run"
    holder = python(HOLDER, str(run))
    assert holder.stdout.readline() == "held\n"
    told: list[str] = []
    with pytest.raises(RunLocked) as error:
        RunLock(run, 0.6, told.append)
    said = str(error.value)
    about = json.loads((run / "lock").read_text())
    assert f"run.dir {run} is being written by process {holder.pid} on" in said
    assert f"{os.uname().nodename}, since {about['since']}, still" in said and "--run.dir" in said
    assert len(told) == 1 and f"process {holder.pid} on" in told[0] and "Ctrl-C" in told[0]
    holder.kill()
    holder.wait()
    with RunLock(run) as lock:
        assert json.loads((run / "lock").read_text())["pid"] == os.getpid()
        with pytest.raises(RunLocked, match=f"process {os.getpid()} on"):
            RunLock(run, 0, told.append)
        assert len(told) == 1
        assert lock.warnings == []
    RunLock(run).release()
    with pytest.raises(ConfigError, match=r"run.dir = .*cannot be written: Not a directory"):
        RunLock(run / "lock" / "run")


def test_a_lock_is_waited_for_until_its_holder_lets_go(tmp_path):
    """As that of an NFS host which has died: its lease ends."""
    held, told = RunLock(tmp_path), []

    def tell(line):
        told.append(line)
        held.release()

    with RunLock(tmp_path, 60, tell):
        assert len(told) == 1


def test_ctrl_c_ends_the_wait_and_leaves_no_file_open(tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    with RunLock(tmp_path):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(KeyboardInterrupt):
            RunLock(tmp_path, 60, interrupt)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("number", "kind"), [(116, exit_codes.RunError), (13, ConfigError)])
def test_what_may_pass_is_no_config_error(tmp_path, number, kind):
    """A stale NFS handle, and missing rights."""
    said = f"cannot be written: {os.strerror(number)}"
    with pytest.raises(kind, match=said), create_in(tmp_path):
        raise OSError(number, os.strerror(number))


def test_a_checkpoint_that_has_come_meanwhile_ends_with_code_1(tmp_path, monkeypatch):
    """And the lock is free again, for the next start."""
    cfg = replace(Config(), **{"run.dir": str(tmp_path)})
    run: Any = SimpleNamespace(cfg=cfg, dir=tmp_path, on_disk=None)
    monkeypatch.setattr(loop.checkpoint, "starting_step", lambda _: 7)
    with pytest.raises(exit_codes.RunError, match="has a new checkpoint from a run that has"):
        start.opened(run, [])
    RunLock(tmp_path, 0).release()


def test_a_file_system_without_locks_is_said_so(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with RunLock(tmp_path) as lock:
        assert lock.warnings == [
            f"cannot lock {tmp_path} (Function not implemented): do not start another run"
        ]


# ---------------------------------------------------------------------------- processes

PARENT = """
import os, sys, time
from jaxpar.runtime.processes import children
child = children.start([sys.executable, "-c", "import time; time.sleep(100)"], os.environ, None)
print(child.pid, flush=True)
time.sleep(100)
"""


def test_no_process_outlives_a_parent_that_is_killed():
    parent = python(PARENT)
    child = int(parent.stdout.readline())
    assert alive(child) and os.getpgid(child) == child != os.getpgid(parent.pid)
    parent.kill()
    parent.wait()
    wait_for(lambda: not alive(child))


def started(*codes: str) -> children.Children:
    commands = [[sys.executable, "-c", f"import os, signal, time; {code}"] for code in codes]
    env = dict(os.environ)
    return children.Children([children.start(c, env, Path(os.devnull)) for c in commands], 1.0)


def test_when_one_fails_the_others_are_ended_whatever_they_do(tmp_path):
    file = str(tmp_path / "deaf")
    deaf = f"signal.signal(15, signal.SIG_IGN); open({file!r}, 'w'); time.sleep(1000)"
    fails = f"list(iter(lambda: time.sleep(0.01) or os.path.exists({file!r}), True)); os._exit(17)"
    family = started(fails, deaf, "time.sleep(1000)")
    ended = family.wait()
    assert ended[0] == 17 and 1 not in ended and ended.get(2, -15) == -15
    assert not any(alive(process.pid) for process in family.processes)


def test_all_that_end_well_are_waited_for():
    assert started("time.sleep(1)", "pass").wait() == {0: 0, 1: 0}
    assert set(started("os._exit(75)", "time.sleep(0.5); os._exit(75)").wait().values()) == {75}


# ------------------------------------------------------------------------------- failures


def words(time: float, error: str, step: int = 7) -> LastWords:
    return LastWords(time=time, error=error, step=step)


FAILURES = [
    # What was told first, not what ended first.
    ({0: 1, 1: 1}, {0: words(2, "Gloo: reset"), 1: words(1, "boom")}, (1, 1, 7, "boom")),
    # A process that was killed took the others with it.
    ({0: 1, 1: -9}, {0: words(1, "Gloo: reset")}, (1, 137, None, "killed by SIGKILL")),
    ({1: -6, 0: -9}, {}, (0, 137, None, "killed by SIGKILL")),
    ({0: -6}, {}, (0, 134, None, "killed by SIGABRT")),
    # These two are the run's own verdict.
    ({0: -6, 1: 17}, {1: words(1, "bad numerics: x")}, (1, 17, 7, "bad numerics: x")),
    ({0: 1, 1: 2}, {}, (1, 2, None, "see its output")),
    ({0: 124, 1: 124}, {0: words(3, "hang: a"), 1: words(2, "hang: b")}, (1, 124, 7, "hang: b")),
    ({1: 0}, {}, (1, 0, None, "the others did not end")),
]


@pytest.mark.parametrize(("ended", "said", "failure"), FAILURES)
def test_the_failure_among_what_followed_from_it(ended, said, failure):
    found = failure_of(ended, said)
    assert (found.rank, found.code, found.step, found.error) == failure


def test_the_same_failure_twice():
    one = Failure(rank=0, code=1, step=7, error="refused 127.0.0.1:5001 at 0x7f12")
    assert one.same_as(Failure(rank=1, code=1, step=7, error="refused 127.0.0.1:6002 at 0x8a"))
    assert not one.same_as(None)
    assert not one.same_as(Failure(rank=0, code=1, step=8, error=one.error))
    assert not one.same_as(Failure(rank=0, code=1, step=7, error="another"))
    killed = Failure(rank=0, code=128 + signal.SIGKILL, step=7, error="killed by SIGKILL")
    assert not killed.same_as(killed)


class Attempts(processes_launcher.Launcher):
    """A launcher whose attempts end as a test says: (codes, newest checkpoint then)."""

    def __init__(self, attempts, run_dir: Path, restarts: int = 2):
        options = LaunchOptions(num_processes=2, restarts=restarts)
        super().__init__(options, [], replace(Config(), **{"run.dir": str(run_dir)}))
        self.left = list(attempts)

    def attempt(self, resumed):
        codes, saved = self.left.pop(0)
        if saved is not None:
            (self.run_dir / "checkpoints" / str(saved)).mkdir(parents=True)
        return codes


KILLED, FINE = {0: -9, 1: 1}, {0: 0, 1: 0}

RUNS = [
    ([(FINE, None)], 0, 0),
    ([({0: 75, 1: 75}, None), (FINE, None)], 75, 1),
    ([({0: 2, 1: 2}, None), (FINE, None)], 2, 1),
    ([({0: 17, 1: 17}, None), (FINE, None)], 17, 1),
    ([(KILLED, None), (KILLED, None), (FINE, None)], 0, 0),
    ([(KILLED, None)] * 4, 137, 1),  # two restarts without progress
    ([(KILLED, None), (KILLED, 5), (KILLED, None), (KILLED, 10), (FINE, None)], 0, 0),
    ([({0: 124, 1: 124}, None)] * 4, 124, 1),
    ([({0: 75, 1: -6}, None), (FINE, None)], 0, 0),
]


@pytest.mark.parametrize(("attempts", "code", "left"), RUNS)
def test_when_a_run_is_started_again(attempts, code, left, tmp_path):
    launcher = Attempts(attempts, tmp_path)
    assert launcher.run() == code
    assert len(launcher.left) == left


@pytest.mark.parametrize(("steps", "code", "left"), [((7, 7, 7), 1, 1), ((7, 8, 7, 9), 1, 1)])
def test_the_same_step_and_error_twice_ends_a_run(steps, code, left, tmp_path):
    class Told(Attempts):
        def attempt(self, resumed):
            (self.run_dir / "ranks").mkdir(exist_ok=True)
            words = {"time": time.time() + 1, "error": "RuntimeError: boom", "step": told.pop(0)}
            (self.run_dir / "ranks" / "1.json").write_text(json.dumps(words))
            return super().attempt(resumed)

    told = list(steps)
    launcher = Told([({0: -6, 1: 1}, None)] * len(steps), tmp_path)
    assert launcher.run() == code
    assert len(launcher.left) == left


def test_a_run_that_was_stopped_during_its_start_can_be_started_again(tmp_path):
    launcher = Attempts([({0: -15, 1: -15}, None)], tmp_path)
    launcher.stop(signal.SIGTERM)
    assert launcher.run() == exit_codes.EXIT_PREEMPTED


# ---------------------------------------------------------------------------- command line


def test_the_command_line_is_the_launchers_and_the_runs():
    for between in (["--"], []):
        words = ["-n", "4", "--run.cpu-devices", "2", *between, "quickstart", "--run.dir", "runs/x"]
        options = read("launch", words)
        assert options.num_processes == 4
        args = processes_launcher.arguments_of(options.config)
        assert args == ["quickstart", "--run.cpu-devices", "2", "--run.dir", "runs/x"]
    assert read("launch", ["quickstart", "-n", "3"]).num_processes == 3


REFUSED = [
    (["-n", "2"], "CONFIG = '': is missing"),
    (["-n", "0", "--", "quickstart"], "must be at least 1"),
    (["-n", "100000", "--", "quickstart"], "must be at most"),
    (["-n", "2", "--grace", "nan", "--", "quickstart"], "must be at least 0"),
    (["-n", "2", "--", "quickstart", "--train.num-step", "1"], "is not a field"),
    (
        ["-n", "2", "--", "quickstart", "--cluster.process-id", "1"],
        r"cluster\.process_id = '1': is set by the launcher",
    ),
    (["-n", "2", "--", "quickstart", "--cluster.detect=none"], "= 'none': is set by the launcher"),
    (["quickstart", "--set", "cluster.num-processes=2"], "= '2': is set by the launcher"),
    (["-n", "2", "--", "quickstart", "--devices_per_process", "1"], "is not a field"),
]


@pytest.mark.parametrize(("args", "rule"), REFUSED)
def test_a_command_line_that_cannot_work_starts_nothing(args, rule):
    with pytest.raises(ConfigError, match=rule):
        call("launch", args)


def test_help_answers(capsys):
    with pytest.raises(SystemExit) as stop:
        read("launch", ["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--num-processes" in shown and "--restarts" in shown and "jaxpar.launch" in shown


def test_gpus_are_shared_out(monkeypatch):
    monkeypatch.setattr(visible, "gpu_is_present", lambda: True)
    monkeypatch.setattr(gpus_xla_flags, "gpu_is_present", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    name = "CUDA_VISIBLE_DEVICES"
    assert processes_launcher.shares_of_gpus(2) == [{name: "4,5"}, {name: "6,7"}]
    assert processes_launcher.shares_of_gpus(4)[3] == {name: "7"}
    with pytest.raises(ConfigError, match="4 GPUs cannot be shared evenly by 3 processes"):
        processes_launcher.shares_of_gpus(3)
    monkeypatch.setattr(visible, "gpu_is_present", lambda: False)
    monkeypatch.setattr(gpus_xla_flags, "gpu_is_present", lambda: False)
    assert processes_launcher.shares_of_gpus(3) == []


def test_a_signal_during_the_start_of_a_process_waits_for_its_end():
    done = []
    with pytest.raises(KeyboardInterrupt), children.held_back():
        signal.raise_signal(signal.SIGINT)  # os.kill may interrupt another thread, and later
        done.append("started")
    assert done == ["started"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Sent(list):
    """Stands for the children: notes the signals that they get."""

    send = list.append


@pytest.mark.parametrize(
    ("came", "sent"),
    [
        ("SIGHUP", ["SIGHUP"]),
        ("SIGHUP SIGHUP SIGHUP", ["SIGHUP"]),
        ("SIGHUP SIGTERM", ["SIGHUP", "SIGKILL"]),
        ("SIGTERM SIGHUP", ["SIGTERM"]),
        ("SIGINT SIGINT", ["SIGTERM", "SIGKILL"]),
    ],
)
def test_signals_are_passed_on(came, sent, tmp_path):
    launcher = Attempts([], tmp_path)
    launcher.running = Sent()
    for name in came.split():
        launcher.stop(getattr(signal, name))
    assert [signal.Signals(number).name for number in launcher.running] == sent


def test_last_words_that_cannot_be_read_are_none(tmp_path):
    (tmp_path / "ranks").mkdir()
    for rank, text in enumerate(("[" * 100_000, '{"time": Infinity}', "{}", "[]", '{"time": "x"}')):
        (tmp_path / "ranks" / f"{rank}.json").write_text(text)
    (tmp_path / "ranks" / "7.json").write_text('{"time": 5, "step": 3}')
    assert children.last_words(tmp_path, 1.0) == {7: LastWords(time=5, step=3)}
