"""Elastic runs over three hosts: one is killed, cut off, comes back; and the rendezvous is lost."""

import subprocess
import sys
import time

import pytest

from jaxpar.runtime import exit_codes
from tests import ranks
from tests.e2e.hosts.elastic import SIZES, ElasticRun, assert_same_to_rounding, last_step
from tests.e2e.hosts.network import Network, require_namespaces

pytestmark = [
    pytest.mark.waits,
    pytest.mark.usefixtures("namespaces"),
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]

#: Seconds for the slowest machine to start a generation.
STARTS = 300

OPTIONS = ["--nodes", "2:3", "--heartbeat-seconds", "4", "--join-seconds", "60"]


@pytest.fixture(scope="module")
def namespaces():
    require_namespaces()


@pytest.fixture(scope="module")
def alone(write_ranks, tmp_path_factory):
    """The run on one device, undisturbed."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-m", "jaxpar.train", write_ranks(folder), "--run.cpu-devices", "1"]
    env = ranks.environment()
    subprocess.run([*command, *SIZES], env=env, check=True, capture_output=True, timeout=STARTS)
    return folder / "run"


@pytest.fixture
def three(write_ranks, tmp_path):
    """(options, serves_here) -> a run on hosts 0 to 2; host 3 serves the rendezvous, or none.

    Each link first loses the share `loss` of its packets.
    """
    ended = []

    def start(options=OPTIONS, serves_here=None, loss=0.0):
        network = Network(4, congestion="reno")
        ended.append(network.__exit__)
        network.__enter__()
        if loss:
            for host in range(4):
                network.lose(host, loss)
        env = {"FAULT": "0 1 slow"}  # 0.3 s a step
        args = [*SIZES]
        run = ElasticRun(
            network, tmp_path, write_ranks(tmp_path), options, args, serves_here, **env
        )
        ended.append(lambda *_: run.end())
        for host in range(3):
            run.start(host)
        return network, run

    yield start
    for end in reversed(ended):
        end(None, None, None)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_killed_host_comes_back(lost, three, tmp_path, alone):
    """Host 0 has process 0 and the coordinator; neither is needed."""
    _, run = three()
    other = 1
    ranks.wait_for(lambda: last_step(tmp_path / "run") >= 7, STARTS)
    run.kill(lost)
    began = time.monotonic()
    ranks.wait_for(lambda: run.told("launch: generation 2: lost", other), 60)
    assert time.monotonic() - began < 30
    ranks.wait_for(lambda: run.told("launch: generation 2: ", other) >= 2, STARTS)
    run.start(lost)
    ranks.wait_for(lambda: run.told("launch: generation 3: ", other) >= 2, STARTS)
    assert set(run.codes(STARTS).values()) == {exit_codes.EXIT_OK}
    said = run.said(other)
    assert "3 of 2:3 hosts train" in said and "2 of 2:3 hosts train" in said
    assert_same_to_rounding(tmp_path / "run", alone)


def test_a_host_that_is_cut_off_ends_its_processes_and_comes_back(three, tmp_path, alone):
    network, run = three()
    ranks.wait_for(lambda: last_step(tmp_path / "run") >= 7, STARTS)
    network.cut(1)
    ranks.wait_for(lambda: run.told("; ending the processes here", 1), 60)
    ranks.wait_for(lambda: run.told("launch: generation 2: ", 0) >= 2, STARTS)
    network.heal(1)
    ranks.wait_for(lambda: run.told("answers again", 1), 60)
    ranks.wait_for(lambda: run.told("launch: generation 3: ", 1) >= 2, STARTS)
    assert set(run.codes(STARTS).values()) == {exit_codes.EXIT_OK}
    assert_same_to_rounding(tmp_path / "run", alone)


def test_lost_packets_lose_no_host(three, tmp_path, alone):
    """With the default limit of 5 s, each link loses 5% in each direction: 10% of a path."""
    _, run = three(["--nodes", "2:3", "--join-seconds", "60"], loss=0.05)
    assert set(run.codes(3 * STARTS).values()) == {exit_codes.EXIT_OK}
    said = "".join(run.said(host) for host in range(3))
    assert "launch: lost" not in said and "launch: generation 2" not in said, said[-3000:]
    assert "3 of 2:3 hosts train" in said
    assert_same_to_rounding(tmp_path / "run", alone)


def test_the_loss_of_a_training_host_that_serves_the_rendezvous_ends_the_run(three, tmp_path):
    _, run = three([*OPTIONS, "--wait-seconds", "10"], serves_here=0)
    ranks.wait_for(lambda: last_step(tmp_path / "run") >= 2, STARTS)
    run.kill(0)
    assert set(run.codes(60).values()) == {exit_codes.EXIT_ERROR}
    assert "has not answered for 10 s, --wait-seconds" in run.said(1)


def test_the_name_of_the_rendezvous_is_unknown(tmp_path, write_ranks):
    with Network(1) as network:
        run = ElasticRun(network, tmp_path, write_ranks(tmp_path), [], [], serves_here=0)
        unknown = "no-such-host.invalid:1234"
        told = ["--nodes", "1", "--wait-seconds", "3", "--rendezvous", unknown]
        at = run.command.index("--")
        run.command[at:at] = told
        run.start(0)
        codes = run.codes(60)
        run.end()
    assert codes == {0: exit_codes.EXIT_ERROR}
    assert "the rendezvous no-such-host.invalid is unknown or out of reach" in run.said(0)
