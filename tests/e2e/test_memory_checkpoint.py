"""A process of a launched run is killed, and the run goes on from memory with the same bits."""

import json

import pytest

from jaxpar.runtime import exit_codes
from tests import ranks


@pytest.mark.slow
def test_a_killed_process_costs_the_steps_since_the_last_copy(write_ranks, tmp_path, whole):
    config, run = write_ranks(tmp_path), tmp_path / "run"
    words = "--checkpoint.memory-every 3 --checkpoint.every 40".split()
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
