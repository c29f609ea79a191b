"""A process of a launched run is killed, and the run goes on from memory with the same bits."""

import json
import signal
import subprocess
import sys

import pytest

from jaxpar.memory_checkpoint.places import MIRRORED, OWN, HostMemory
from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes.sources import LAUNCHED
from tests import ranks
from tests.memory_checkpoint.hosts import TOKEN, FakeHosts, fake_hosts

pytestmark = pytest.mark.slow


@pytest.mark.waits
def test_a_killed_process_costs_the_steps_since_the_last_copy(write_ranks, tmp_path, whole):
    config, run = write_ranks(tmp_path), tmp_path / "run"
    words = "--checkpoint.memory.every 3 --checkpoint.every 40".split()
    fault = {"FAULT": "1 14 SIGKILL", "FAULT_ONCE": str(tmp_path / "once")}
    process = ranks.launch(2, 2, "--", config, *words, **fault, JAXPAR_MEMORY_FOLDER=str(tmp_path))
    code, said = ranks.finish(process)
    assert code == exit_codes.EXIT_OK, said[-3000:]
    assert "launch: restarting from step 12, in memory, restart 1 of 3" in said
    assert "restored step 12 from memory" in said
    ranks.assert_same_run(run, whole)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "from"] == [0, 12]
    assert not list(tmp_path.glob("*jaxpar-memory-*"))  # given back at the end


@pytest.mark.waits
@pytest.mark.timeout(600)
def test_a_lost_host_is_replaced_by_its_copy_on_the_other(write_ranks, tmp_path, whole):
    """Two hosts are two folders with a server each; one is emptied while no process runs."""
    config, run = write_ranks(tmp_path), tmp_path / "run"
    words = "--checkpoint.memory.every 3 --checkpoint.every 40 --run.cpu-devices 2".split()

    def attempt(hosts: FakeHosts, **fault: str) -> tuple[list[int], str]:
        coordinator, started = f"127.0.0.1:{ranks.free_port()}", []
        for host in (0, 1):
            place = dict(zip(LAUNCHED, (coordinator, "2", str(host)), strict=True))
            of_host = HostMemory(hosts.folders[host]).variables(hosts.peers, host)
            command = [sys.executable, "-m", "jaxpar.train", config, *words]
            env = ranks.environment(**place, **of_host, **TOKEN.environment(), **fault)
            with open(tmp_path / f"out{host}", "w") as out:
                started.append(
                    subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=ranks.ROOT)
                )
        codes = [process.wait(600) for process in started]
        return codes, (tmp_path / "out0").read_text() + (tmp_path / "out1").read_text()

    with fake_hosts(tmp_path / "hosts", 2) as hosts:
        codes, said = attempt(hosts, FAULT="1 14 SIGKILL", FAULT_ONCE=str(tmp_path / "once"))
        assert codes[1] == -signal.SIGKILL and codes[0], said[-3000:]
        assert "; sent 0.000 GB in" in said
        hosts.lose(1)
        codes, said = attempt(hosts)
        assert codes == [0, 0], said[-3000:]
        assert "restored step 12 from memory" in said
        # Each host has two copies at most, and two of the other's.
        assert {len(hosts.files(host, kind)) for host in (0, 1) for kind in (OWN, MIRRORED)} <= {
            2,
            4,
        }
    ranks.assert_same_run(run, whole)
