"""Starting processes, ending them, the run folder's lock, and what a failure is."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpar.commands import call, read
from jaxpar.config import Config, ConfigError, replace
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files.lock import RunLock, RunLocked, create_in
from jaxpar.runtime.gpus import visible
from jaxpar.runtime.gpus import xla_flags as gpus_xla_flags
from jaxpar.runtime.processes import children
from jaxpar.runtime.processes import launcher as processes_launcher
from jaxpar.runtime.processes.addresses import FreePort
from jaxpar.runtime.processes.children import Failure, LastWords, failure_of
from jaxpar.runtime.processes.hosts import generations
from jaxpar.runtime.processes.hosts.agent import Agent
from jaxpar.runtime.processes.hosts.generations import Host, Restarts, Rules
from jaxpar.runtime.processes.hosts.kv_store import LocalStore
from jaxpar.runtime.processes.hosts.membership import Membership
from jaxpar.runtime.processes.hosts.trainers import (
    FOLLOW_SECONDS,
    SETTLE_SECONDS,
    Program,
    Trainers,
)
from jaxpar.runtime.processes.launch_options import LaunchOptions
from jaxpar.runtime.processes.sources import LAUNCHED, NUM_HOSTS
from jaxpar.training import start
from tests.ranks import alive, wait_for
from tests.runtime.hosts.simulated import Clock, Process, checkpoint, words_of

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
from jaxpar.runtime.files.lock import RunLock
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
    monkeypatch.setattr(start, "starting_step", lambda _: 7)
    with pytest.raises(exit_codes.RunError, match="has a new checkpoint from a run that has"):
        start.opened(run, []).__enter__()
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


def started(run_dir: Path, clock: Clock, *codes: str) -> Trainers:
    """The processes of a generation, each of which executes some Python."""
    left = [[sys.executable, "-c", f"import os, signal, time; {code}"] for code in codes]

    def start(command, env, log):
        return children.start(left.pop(0), env, Path(os.devnull))

    host = Host(name="a", life="1", address="a", port=1, devices=1, processes=len(codes), ready=1)
    formed = generations.next_generation(1, [host], None, None, Restarts())
    family = Trainers(Program(command=[], run_dir=run_dir, start=start), formed, "a", clock)
    family.start({})
    return family


def test_when_one_fails_the_others_are_ended_whatever_they_do(tmp_path):
    file = str(tmp_path / "deaf")
    deaf = f"signal.signal(15, signal.SIG_IGN); open({file!r}, 'w'); time.sleep(1000)"
    fails = f"list(iter(lambda: time.sleep(0.01) or os.path.exists({file!r}), True)); os._exit(9)"
    clock = Clock()
    family = started(tmp_path, clock, fails, deaf, "time.sleep(1000)")
    wait_for(lambda: family.look() or 0 in family.ended)
    assert family.failed() and family.failure is None
    clock.sleep(SETTLE_SECONDS)
    wait_for(lambda: family.look() or 2 in family.ended)
    assert family.ended == {0: 9, 2: -signal.SIGTERM}
    clock.sleep(family.program.grace)
    assert family.look() and 1 not in family.ended
    assert family.failure.code == 9  # not what SIGTERM has made of another
    assert not any(alive(process.pid) for process in family.processes.values())


def test_all_that_end_well_are_waited_for(tmp_path):
    for code in 0, 75:
        family = started(
            tmp_path, Clock(), f"time.sleep(0.2); os._exit({code})", f"os._exit({code})"
        )
        wait_for(family.look)
        assert family.all_ended_with(code) and not family.failed()


def test_a_process_that_ends_long_before_the_others_has_failed(tmp_path):
    clock = Clock()
    family = started(tmp_path, clock, "pass", "time.sleep(1000)")
    wait_for(lambda: family.look() or 0 in family.ended)
    clock.sleep(FOLLOW_SECONDS)
    assert not family.look() and not family.failed()
    clock.sleep(1)
    assert not family.look() and family.failed()
    clock.sleep(SETTLE_SECONDS)
    said = "hang: process 0 ended with code 0, and the others did not end"
    assert not family.look() and str(family.failure) == said and family.failure.code == 124
    family.kill()


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
    ({1: 75}, {}, (1, 75, None, "the others did not stop with it")),
    ({0: 0, 1: 75}, {}, (1, 75, None, "the others did not stop with it")),
    # Not a code that says that the run is complete.
    ({1: 0}, {}, (1, 124, None, "hang: process 1 ended with code 0, and the others did not end")),
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


class Attempts:
    """A launcher of two processes, whose attempts end as a test says: (codes, checkpoint then)."""

    def __init__(self, attempts, run_dir: Path, restarts: int = 2):
        self.left, self.run_dir, self.clock = list(attempts), run_dir, Clock()
        self.commands: list[list[str]] = []
        own = {"name": "a", "address": "127.0.0.1", "devices": 2, "processes": 2}
        here = Membership(LocalStore({}, self.clock), own, 0.0, self.clock)
        program = Program(command=["train"], run_dir=run_dir, start=self.start)
        # The limits of several hosts mean nothing here.
        options = LaunchOptions(num_processes=2, heartbeat_seconds=0, wait_seconds=0)
        rules = Rules(restarts=restarts)
        self.agent = Agent(options, rules, program, here, clock=self.clock)

    def start(self, command, env, log) -> Any:
        process = Process(command, env)
        assert env[LAUNCHED[0]].startswith("127.0.0.1:") and NUM_HOSTS not in env
        assert (log is None) == (process.rank == 0)
        codes, saved = self.left[0]
        process.returncode = codes[process.rank]
        if process.rank == 1:
            self.end_of_start(saved)
        return process

    def end_of_start(self, saved: int | None) -> None:
        """Both have been started."""
        self.left.pop(0)
        if saved is not None:
            checkpoint(self.run_dir, saved)

    def run(self) -> int:
        return self.agent.run()


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
        def end_of_start(self, saved):
            words_of(tmp_path, 1, time=self.clock.now, error="RuntimeError: boom", step=told.pop(0))
            super().end_of_start(saved)

    told = list(steps)
    launcher = Told([({0: -6, 1: 1}, None)] * len(steps), tmp_path)
    assert launcher.run() == code
    assert len(launcher.left) == left


class Stopped(Attempts):
    """A launcher that is stopped while its first processes start."""

    def end_of_start(self, saved):
        super().end_of_start(saved)
        self.agent.stop(signal.SIGTERM)


def test_a_run_that_was_stopped_during_its_start_can_be_started_again(tmp_path):
    for codes in ({0: -15, 1: -15}, {0: 1, 1: -15}, {0: 75, 1: 75}):
        assert Stopped([(codes, None)], tmp_path).run() == exit_codes.EXIT_PREEMPTED


BEGINNING = "launch: restarting from the beginning, restart 1 of 2"
SAID = [
    (Attempts, [(FINE, None)], []),
    (Attempts, [({0: 75, 1: 75}, None)], []),
    (
        Attempts,
        [(KILLED, None), (KILLED, 5), ({0: 2, 1: 1}, None)],
        [
            "launch: process 0 ended with code 137: killed by SIGKILL",
            BEGINNING,
            "launch: process 0 ended with code 137: killed by SIGKILL",
            "launch: restarting from checkpoint 5, restart 1 of 2",
            "launch: process 0 ended with code 2: see its output",
            "launch: it would fail again",
        ],
    ),
    (
        Attempts,
        [({0: 1, 1: 17}, None)],
        [
            "--- end of RUN/logs/rank-1.log",
            "the end of it",
            "---",
            "launch: process 1 ended with code 17: see its output",
            "launch: it would fail again",
        ],
    ),
    (Stopped, [({0: 75, 1: 75}, None)], []),
    (Stopped, [({0: -15, 1: 75}, None)], ["launch: stopped by SIGTERM"]),
    (
        Stopped,
        [({0: 1, 1: -6}, None)],
        [
            "launch: process 0 ended with code 1: see its output",
            "launch: stopped by SIGTERM, but failed",
        ],
    ),
]


@pytest.mark.parametrize(("kind", "attempts", "said"), SAID)
def test_what_a_launcher_says(kind, attempts, said, tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text("the end of it\n")
    kind(attempts, tmp_path).run()
    assert capsys.readouterr().err.replace(str(tmp_path), "RUN").splitlines() == said


def test_processes_that_fail_start_again_without_delay(tmp_path):
    """A launcher of one host waits for nobody: neither at the start nor between attempts."""
    launcher = Attempts([(KILLED, None), (KILLED, 5), (FINE, None)], tmp_path)
    assert launcher.run() == 0
    assert launcher.clock.now - Clock().now < 0.5


# ---------------------------------------------------------------------------- command line


def test_the_command_line_is_the_launchers_and_the_runs():
    for between in (["--"], []):
        words = ["-n", "4", "--run.cpu-devices", "2", *between, "quickstart", "--run.dir", "runs/x"]
        options = read("launch", words)
        assert options.num_processes == 4
        args = processes_launcher.arguments_of(options.config)
        assert args == ["quickstart", "--run.cpu-devices", "2", "--run.dir", "runs/x"]
    assert read("launch", ["quickstart", "-n", "3"]).num_processes == 3
    alone = read("launch", ["quickstart"])
    assert processes_launcher.arguments_of(alone.config) == ["quickstart"]


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
    """Stands for the processes: notes the signals that they get."""

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
    agent, got = Attempts([], tmp_path).agent, Sent()
    agent.trainers = got  # type: ignore[assignment]
    for name in came.split():
        agent.stop(getattr(signal, name))
    assert [signal.Signals(number).name for number in got] == sent


def test_last_words_that_cannot_be_read_are_none(tmp_path):
    (tmp_path / "ranks").mkdir()
    for rank, text in enumerate(("[" * 100_000, '{"time": Infinity}', "{}", "[]", '{"time": "x"}')):
        (tmp_path / "ranks" / f"{rank}.json").write_text(text)
    (tmp_path / "ranks" / "7.json").write_text('{"time": 5, "step": 3}')
    assert children.last_words(tmp_path, 1.0) == {7: LastWords(time=5, step=3)}
