"""Programs beside training as one of several processes: they join the others, or say why not."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.text import prepare
from jaxpar.data.skips import SKIPPED_FILE
from jaxpar.runtime.processes import rendezvous
from tests import ranks

pytestmark = pytest.mark.waits

#: A line of gloo's, and what another of its threads wrote in the middle of it.
GLOO = r"\[Gloo\].*\n(?:\d*\n)*"


def in_two(*words: str, at: tuple[Path | None, ...] = (None, None)) -> list[tuple[int, str, str]]:
    """Two processes of a program, which find each other by JAX's variables: code, out, err.

    Out is without gloo's own lines. Args:     at: the folder where each of them runs.
    """
    address, started = f"127.0.0.1:{ranks.free_port()}", []
    for own in range(2):
        place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": str(own)}
        env = ranks.environment(**place, JAX_NUM_PROCESSES="2")
        command = [sys.executable, "-m", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=env, cwd=at[own], **pipes))
    said = [process.communicate(timeout=600) for process in started]
    codes = [process.returncode for process in started]
    own = lambda out: re.sub(GLOO, "", out)  # noqa: E731
    return [(code, own(out), err) for code, (out, err) in zip(codes, said, strict=True)]


@pytest.mark.slow  # quicker: processes that are refused, below, have joined as well
def test_two_processes_write_the_text_of_one(whole, capsys):
    words = [str(whole), "--temperature", "0", "--max-tokens", "20"]
    words += ["--tensor", "2", "--prompt", "the cat "]
    capsys.readouterr()
    call("sample", words)
    alone = capsys.readouterr().out
    assert alone.startswith("the cat ")
    (first, out, err), (second, nothing, _) = in_two("jaxpar.sample", *words)
    assert (first, second) == (0, 0), err
    assert (out, nothing) == (alone, "")
    assert "cluster    jax: process 0 of 2" in err


@pytest.mark.slow
def test_a_benchmark_of_two_processes(write_ranks, tmp_path):
    card = tmp_path / "card.json"
    words = ["jaxpar.profile", "--bench", write_ranks(tmp_path)]
    words += ["--steps", "2", "--profile-steps", "0", "--card", str(card)]
    words += ["--run.cpu-devices", "2", "--parallel.auto", "all"]
    (first, out, err), (second, nothing, _) = in_two(*words)
    assert (first, second) == (0, 0), err
    result = json.loads(card.read_text())
    assert result["processes"] == "2" and result["device"].startswith("4 x ")
    assert "layout     " in out and "tokens/s/device" in out and nothing == ""


@pytest.mark.slow
def test_two_processes_score_as_one(whole, tmp_path):
    task = """task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["mat", "log"]
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
    documents = tmp_path / "letters.jsonl"
    documents.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("the cat", "the dog")))
    (tmp_path / "letters.yaml").write_text(task.replace("FILE", str(documents)))
    words = ["jaxpar.evaluate", str(whole), "--tasks", "letters", "--tensor", "2"]
    words += ["--include-path", str(tmp_path), "--output"]
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    command = [sys.executable, "-m", *words, str(one)]
    subprocess.run(command, env=ranks.environment(), check=True, timeout=600)
    assert [code for code, _, _ in in_two(*words, str(two))] == [0, 0]
    found, wanted = (json.loads(file.read_text())["results"] for file in (two, one))
    assert found == wanted and "acc,none" in found["letters"]


@pytest.mark.slow
def test_devices_that_would_be_left_over_are_refused(whole):
    for code, _, said in in_two("jaxpar.sample", str(whole), "--tensor", "3"):
        assert code == 2 and "--tensor = 3: must be all 2 devices of the 2 processes" in said


def test_variables_that_are_half_set_have_started_no_others():
    rendezvous.require_single_process("jaxpar.certify", {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})
    several = {"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
    with pytest.raises(ConfigError, match=r"process = '1 of 4': .*unset the variables of torch"):
        rendezvous.require_single_process("jaxpar.certify", several)


@pytest.fixture
def apart(dataset, write_ranks, tmp_path):
    """Two hosts that share no disk: a config file, and the folder that each has for itself."""
    config = ranks.write_config(tmp_path, Path("verses"))
    for host in ("one", "other"):
        shutil.copytree(dataset, tmp_path / host / "verses")
    return config, tmp_path / "one", tmp_path / "other"


@pytest.mark.slow
@pytest.mark.parametrize("differs", ["data set", SKIPPED_FILE])
def test_processes_with_other_data_at_the_same_path_are_refused(differs, apart):
    config, one, other = apart
    if differs == SKIPPED_FILE:
        (other / "run").mkdir()
        (other / "run" / SKIPPED_FILE).write_text('{"windows": [[3, 2]]}')
    else:
        text = other / "more.jsonl"
        ranks.write_text(text)
        text.write_text(text.read_text() + json.dumps({"text": ranks.VERSE * 9}) + "\n")
        to = str(other / "verses")
        prepare(PrepareOptions(input=(str(text),), output=to, holdout=0.2, overwrite=True))
    words = ("jaxpar.train", config, "--run.dir", "run", "--run.cpu-devices", "1")
    for code, _, err in in_two(*words, at=(one, other)):
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert code == 2 and "Traceback" not in err, err
        assert line.startswith("error: process 1 (") and f"has a different {differs} than" in line
