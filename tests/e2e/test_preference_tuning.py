"""A run tuned on pairs of responses: it learns to prefer, also those of prompts held out."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxpar.checkpoint.branching import branch
from jaxpar.config import replace, value_of
from jaxpar.config.command_line import load_config
from jaxpar.data.options import PreparePairsOptions
from jaxpar.data.prepare.records_command import prepare_records
from jaxpar.features.dpo import Dpo
from jaxpar.features.dpo.reference import reference_file
from tests.slow import slow

STEPS = 12


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Prompts of a number each. Polite responses are preferred, whatever else they say."""
    folder = tmp_path_factory.mktemp("pairs")
    lines = [
        {"prompt": f"{n * n}?", "chosen": f"{n}, please", "rejected": f"{n}! Go."}
        for n in range(300, 500)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"input": (str(folder / "pairs.jsonl"),), "output": str(folder / "out")}
    prepare_records(PreparePairsOptions(**files, tokenizer="bytes", holdout=0.2))
    return folder / "out"


def records(run: Path, name: str) -> dict[int, float]:
    """A metric of a run by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


@pytest.mark.slow  # quicker: meshes/test_preferences.py
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(("devices", "mesh"), [(2, []), slow(4, ["--parallel.tensor", "2"])])
def test_it_learns_the_preference_and_resumes_without_the_reference(
    devices, mesh, train_on, write_config, pairs, tmp_path
):
    config, run = write_config(tmp_path), tmp_path / "run"
    flags = ["--data.path", str(pairs), "--data.seq-len", "128", "--dpo.beta", "0.2"]
    flags += ["--lora.rank", "4", "--train.num-steps", str(STEPS), "--checkpoint.every", "6"]
    flags += ["--optimizer.schedule", "constant", "--evaluation.every", "6"]
    assert train_on(2, config, *flags) == 0
    losses, held_out = records(run, "loss"), records(run, "held_out_reward_accuracy")
    assert losses[1] == pytest.approx(math.log(2), abs=1e-6)  # the policy is the reference
    assert losses[STEPS] < 0.4 and held_out[STEPS] > 0.9
    assert records(run, "held_out_loss")[STEPS] < records(run, "held_out_loss")[6]
    assert records(run, "reward_margin")[STEPS] > 0.8

    again = tmp_path / "again"
    branch(str(run), str(again), 6, print)
    assert not reference_file(again, "train").exists()
    assert train_on(devices, config, *flags, "--run.dir", str(again), *mesh) == 0
    for name in ("loss", "reward_margin", "chosen_reward"):
        first, second = records(run, name), records(again, name)
        later = range(7, STEPS + 1)
        np.testing.assert_allclose([second[s] for s in later], [first[s] for s in later], 1e-4)
    one, other = (np.load(reference_file(folder, "train"))["scores"] for folder in (run, again))
    assert (one < 0).any() and np.allclose(one, other, atol=1e-5)


def test_the_config_is_that_of_the_model_it_tunes():
    tuned, first = (load_config(name) for name in ("llama_1b_dpo", "llama_1b_lora_chat"))
    same = ("run.dir", "data.path", "dpo", "optimizer.learning_rate")
    of = {path: value_of(first, path) for path in same}
    assert replace(tuned, **of) == first and tuned.dpo == Dpo(beta=0.1)
