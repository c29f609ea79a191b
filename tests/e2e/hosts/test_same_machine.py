"""Launchers of several hosts on one machine, without namespaces: names and memory of their own."""

import subprocess
import sys

import pytest

from jaxpar.memory_checkpoint.places import complete_files
from jaxpar.monitoring.goodput import read_events
from jaxpar.runtime import exit_codes
from tests import ranks
from tests.e2e.hosts.elastic import SIZES, ElasticRun, assert_same_to_rounding, last_step
from tests.e2e.hosts.same_machine import SameMachine

OPTIONS = ["--nodes", "1:2", "--heartbeat-seconds", "4", "--join-seconds", "60"]

#: Seconds for the slowest machine to start a generation.
STARTS = 300


@pytest.mark.waits
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_other_host_goes_on_from_its_memory(write_ranks, tmp_path):
    """The lost one had process 0, the coordinator, and half of the state."""
    config = write_ranks(tmp_path)
    alone = [*SIZES, "--run.dir", str(tmp_path / "alone"), "--run.cpu-devices", "1"]
    train = [sys.executable, "-m", "jaxpar.train", config, *alone]
    env = ranks.environment()
    subprocess.run(train, env=env, check=True, capture_output=True, timeout=STARTS)
    run_dir, args = tmp_path / "run", [*SIZES, "--checkpoint.memory.every", "2"]
    with SameMachine(3, memory=tmp_path) as machine:
        run = ElasticRun(machine, tmp_path, config, OPTIONS, args, FAULT="0 1 slow")
        for host in range(2):
            run.start(host)
        ranks.wait_for(lambda: last_step(run_dir) >= 9, STARTS)
        folders = [*tmp_path.glob("jaxpar-hosts-*/host*/jaxpar-memory-*")]
        assert len(folders) == 2 and all(map(complete_files, folders))
        run.kill(0)
        assert run.codes(STARTS) == {1: exit_codes.EXIT_OK}
        assert "launch: generation 2: lost host0: no sign of life" in run.said(1)
    assert not [*tmp_path.glob("jaxpar-hosts-*")]
    (restored,) = (e for e in read_events(run_dir) if e["event"] == "restored")
    assert restored["source"] == "memory" and restored["repeated"] <= 3
    assert_same_to_rounding(run_dir, tmp_path / "alone")
