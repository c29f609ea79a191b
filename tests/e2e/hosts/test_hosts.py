"""Runs over two hosts, each with its own address, name and link: what they do, and how they end."""

import json
import os
import sys
import time

import pytest

from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes.connecting import HEARTBEAT_SECONDS
from jaxpar.tools.doctor.measure.links import ACROSS, WITHIN
from tests import ranks
from tests.e2e.hosts.network import Network, require_namespaces
from tests.e2e.hosts.run import Run, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("namespaces")]

#: JAX's client aborts a process that its coordinator no longer answers.
ABORTED = -6

#: Seconds within which a run ends that has lost a host: those without a heartbeat, and a few.
TO_NOTICE = HEARTBEAT_SECONDS + 10


@pytest.fixture(scope="module")
def namespaces():
    require_namespaces()


@pytest.mark.parametrize("own_names", ["", "127.0.1.1"])
def test_two_hosts_train_what_one_does(own_names, write_ranks, tmp_path, whole):
    """Also where a host's name is a loopback address to itself, as on Debian."""
    config = write_ranks(tmp_path)
    with Network(2, own_names) as network:
        run = Run(network, config, tmp_path, network.names[0], "--cluster.network", "tcp")
        codes = run.codes(150)
    assert codes == [exit_codes.EXIT_OK] * 2, run.said(0)[-2000:] + run.said(1)[-2000:]
    assert ", 2 hosts" in run.said(0)
    assert "network    tcp: as cluster.network says" in run.said(0)
    ranks.assert_same_run(tmp_path / "run", whole)


@pytest.mark.timeout(500)
def test_a_cut_ends_the_run_and_the_next_one_goes_on(write_ranks, tmp_path, whole):
    """No connection closes, so that nobody fails at once."""
    config = write_ranks(tmp_path)
    with Network(2) as network:
        run = Run(network, config, tmp_path, network.addresses[0])
        wait_for_step(tmp_path / "run", 8)
        network.cut(1)
        began = time.monotonic()
        codes = run.codes(TO_NOTICE + 30)
        assert time.monotonic() - began < TO_NOTICE
        assert codes == [ABORTED] * 2, run.said(0)[-2000:] + run.said(1)[-2000:]
        network.heal(1)
        again = Run(network, config, tmp_path, network.addresses[0])
        assert again.codes(150) == [exit_codes.EXIT_OK] * 2, again.said(0)[-2000:]
    ranks.assert_same_run(tmp_path / "run", whole)


def test_a_slow_link_changes_no_number(write_ranks, tmp_path, whole):
    config = write_ranks(tmp_path)
    with Network(2) as network:
        run = Run(network, config, tmp_path, network.addresses[0])
        wait_for_step(tmp_path / "run", 4)
        for host in 0, 1:
            network.limit(host, "2mbit")
        assert run.codes(250) == [exit_codes.EXIT_OK] * 2, run.said(0)[-2000:]
    ranks.assert_same_run(tmp_path / "run", whole)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_host(lost, write_ranks, tmp_path):
    """The coordinator's death aborts the others at once; another one's fails their collectives."""
    config = write_ranks(tmp_path)
    with Network(2) as network:
        run = Run(network, config, tmp_path, network.addresses[0])
        wait_for_step(tmp_path / "run", 8)
        run.processes[lost].kill()
        began = time.monotonic()
        codes = run.codes(TO_NOTICE)
        assert time.monotonic() - began < 20
    assert codes[lost] == -9 and codes[1 - lost] in (1, ABORTED), codes


def test_a_coordinator_without_a_name(write_ranks, tmp_path):
    config = write_ranks(tmp_path)
    with Network(2) as network:
        limit = ("--cluster.connect-seconds", "10")
        run = Run(network, config, tmp_path, "no-such-host.invalid", *limit)
        codes = run.codes(120)
    assert set(codes) == {1}, run.said(0)[-2000:] + run.said(1)[-2000:]


def test_the_doctor_measures_within_hosts_and_across_them(tmp_path):
    """Started like a run, with the same detection; here by flags."""
    command = [sys.executable, "-m", "jaxpar.doctor", "--only", "hardware,bandwidth"]
    command += ["--run.cpu-devices", "2", "--largest", "1KiB", "--cluster.num-processes", "2"]
    with Network(2) as network, open(tmp_path / "log", "w") as log:
        where = ["--cluster.coordinator", f"{network.addresses[0]}:{ranks.free_port()}"]
        where += ["--json", str(tmp_path / "doctor.json"), "--cluster.process-id"]
        env = os.environ | {"COLUMNS": "150"}
        each = [network.start(i, [*command, *where, str(i)], env, log) for i in (0, 1)]
        assert [process.wait(200) for process in each] == [0, 0], (tmp_path / "log").read_text()
    found = json.loads((tmp_path / "doctor.json").read_text())
    rows = [(row["over"], row["devices"]) for row in found["bandwidth"]]
    assert {over: count for over, count in rows} == {"all": 4, WITHIN: 2, ACROSS: 2}
    (finding,) = [f for f in found["findings"] if f["check"] == "across hosts"]
    assert finding["status"] == "pass" and "within a host" in finding["said"]
