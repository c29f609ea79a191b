"""What processes say to one another before and beside training, in two that have met."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests import ranks
from tests.slow import slow

pytestmark = pytest.mark.waits

#: Every check in one start: what each of the two processes found is its last line.
SCRIPT = """
import json, os, sys, time
from jaxpar.runtime.processes import connecting, peers, rendezvous
from jaxpar.config import Config, ConfigError
found = {}
def caught(name, work):
    try:
        found[name] = work()
    except Exception as error:
        found[name] = [type(error).__name__, str(error), getattr(error, "code", None)]
place = rendezvous.detect(Config(), os.environ)
found["line"] = connecting.connect(place, 200)
own = peers.rank()
found["count"] = peers.world_size()
caught("exchange", lambda: peers.exchange("names", f"I am {own}", 200))
def fail_in_1():
    if own == 1:
        raise ConfigError("data.path", "x", "is not there", "copy it")
    return "fine"
caught("together", lambda: peers.all_or_none("checks", 200, fail_in_1))
caught("same", lambda: peers.check_same("program", lambda: "text", 200))
caught("differs", lambda: peers.check_same("config", lambda: f"text {own}", 200))
if own == 0:
    began = time.monotonic()
    caught("missing", lambda: peers.exchange("here", "", 0.6))
    found["seconds"] = time.monotonic() - began
peers.exchange("end", "", 200)
print(json.dumps(found), flush=True)
peers.leave(True)
os._exit(0)
"""


ALONE = """
import sys
from jaxpar.runtime.program import run_program
from jaxpar.runtime.processes import connecting
from jaxpar.runtime.processes.sources import ProcessPlace
place = ProcessPlace(
    source="flags", coordinator=sys.argv[1], num_processes=2, process_id=int(sys.argv[2])
)
run_program(lambda _: print(connecting.connect(place, 1)))
"""


@pytest.mark.parametrize("host", ["127.0.0.1", slow(socket.gethostname())])
def test_a_port_that_another_program_has_is_said_so(host):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        address = f"{host}:{other.getsockname()[1]}"
        command = [sys.executable, "-c", ALONE, address, "0"]
        env = ranks.environment()
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=ranks.HANG)
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: ") and f"uses port {address.rpartition(':')[2]}. Fix: " in said


def test_a_process_that_nobody_joins_says_so_and_ends():
    started = []
    for own in (0, 1):  # each of a run of its own
        address = f"127.0.0.1:{ranks.free_port()}"
        command = [sys.executable, "-c", ALONE, address, str(own)]
        pipes = {"stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=ranks.environment(), **pipes)
        started.append((address, process))
    found = ("answers, so other processes are missing", "does not answer (")
    for own, (address, process) in enumerate(started):
        _, said = process.communicate(timeout=ranks.HANG)
        assert process.returncode == 1, said
        assert f"error: flags: process {own} of 2, coordinator {address}: not all" in said
        assert found[own] in said and "loopback" in said


@pytest.fixture
def address():
    """Of a coordinator, whose port another program has on another address of this host."""
    with socket.create_server(("127.0.0.2", 0)) as other:
        yield f"127.0.0.1:{other.getsockname()[1]}"


def test_two_processes_meet_and_say_what_is_wrong(address):
    started = []
    for own in range(2):
        env = ranks.environment(
            JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(own)
        )
        command = [sys.executable, "-c", SCRIPT]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=ranks.HANG)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    first, second = (json.loads(text.splitlines()[-1]) for text in said)
    assert first["line"] == f"jax: process 0 of 2, coordinator {address}"
    assert first["count"] == second["count"] == 2
    assert first["exchange"] == second["exchange"] == ["I am 0", "I am 1"]
    kind, text, code = first["together"]
    assert (kind, code) == ("PeerFailed", 2)
    assert text.startswith("checks: process 1 (") and "data.path = 'x': is not there" in text
    assert second["together"][0] == "ConfigError"
    assert first["same"] is second["same"] is None
    for found in (first, second):
        assert found["differs"][0] == "PeerFailed" and found["differs"][2] == 2
        assert (
            "process 1 (" in found["differs"][1]
            and "a different config than" in found["differs"][1]
        )
    kind, text, _ = first["missing"]
    assert kind == "PeersMissing" and "here: after 1 s, still missing: process 1 (" in text
    assert first["seconds"] > 0.5


#: One of two processes that see the GPUs of one host.
ON_GPUS = """
import os
from jaxpar.config import Config
from jaxpar.runtime.gpus import visible
from jaxpar.runtime.processes import connecting, rendezvous
from jaxpar.runtime.program import run_program
from tests.fake_nvml import FakeNvml, named
visible.gpu_is_present = lambda: True
gpus = [named("0000:1b:00.0", "GPU-a"), named("0000:3b:00.0", "GPU-b")]
with FakeNvml(gpus).installed():
    run_program(lambda _: print(connecting.connect(rendezvous.detect(Config(), os.environ), 200)))
"""


@pytest.mark.parametrize("shares", [slow(True), False])
def test_processes_say_which_gpus_they_take_and_never_share_one(shares):
    task = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    task |= {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_TRES_PER_TASK": "cpu=1"}
    task |= {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_ID": str(os.getpid())}  # a port of its own
    if not shares:
        task["SLURM_GPUS_PER_TASK"] = "2"  # as if each saw two of its own
    started = []
    for own in ("0", "1"):
        env = ranks.environment(**task, SLURM_PROCID=own, SLURM_LOCALID=own)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", ON_GPUS], env=env, **pipes))
    said = [process.communicate(timeout=ranks.HANG) for process in started]
    host = socket.gethostname()
    for own, (out, wrong) in enumerate(said):
        which = f"GPU {own} of the 2 that it sees (GPU-{'ab'[own]})"
        which = which if shares else "GPUs 0,1 of the 2 that it sees (GPU-a, GPU-b)"
        assert out.count(f"cluster    process {own} ({host}) takes {which}\n") == 1, wrong
        assert started[own].returncode == (0 if shares else 2), wrong
        both = f"GPU = 'GPU-a': processes 0 and 1 on {host} both took it, and 1 more GPU like it"
        assert (both in wrong) == (not shares)


#: A process of a run of one, which gets SIGTERM before it has taken a step.
STOPPED = """
import os, signal, sys, time
from jaxpar.runtime import signals
from jaxpar.runtime.processes import connecting, peers
from jaxpar.runtime.processes.sources import ProcessPlace
place = ProcessPlace(source="flags", coordinator=sys.argv[1], num_processes=1, process_id=0)
connecting.connect(place, 60)
with signals.StopRequest(several=True) as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.5)  # JAX looks once a second
    asked = 1
    while not stop.due() and asked < 20_000:
        asked += 1
        time.sleep(0.01)
print(asked, stop.received, stop.due(), stop.due(), flush=True)
peers.leave(True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_signal_during_the_start_is_heeded_after_the_first_step():
    command = [sys.executable, "-c", STOPPED, f"127.0.0.1:{ranks.free_port()}"]
    env = ranks.environment()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=ranks.HANG)
    asked, *rest = done.stdout.splitlines()[-1].split()
    assert int(asked) < 20_000 and rest == ["SIGTERM", "True", "True"], done.stderr
