"""A trained run, tuned on conversations: it learns the answers, and nothing of the questions."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.config import ConfigError, replace
from jaxpar.config.command_line import load_config, read_config
from jaxpar.data.options import PrepareChatOptions
from jaxpar.data.prepare.records_command import prepare_records
from jaxpar.inference.generation import generate
from jaxpar.inference.load import load
from jaxpar.inference.options import Sampling
from jaxpar.training.run import Run

#: Each question is a number of its own, which nobody can guess; all have one answer.
QUESTIONS, ANSWER = range(3000, 3400), "the log, of course."


def write_chats(
    folder: Path, questions: Iterable[int], answer: str, asked: int = 1, holdout: float = 0.02
) -> Path:
    """Conversations of a question, asked so many times, and the answer, prepared."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": asked * f"{n * n}?"},
                {"role": "assistant", "content": answer},
            ]
        }
        for n in questions
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"input": (str(folder / "chats.jsonl"),), "output": str(folder / "out")}
    prepare_records(PrepareChatOptions(**files, tokenizer="bytes", holdout=holdout))
    return folder / "out"


def test_held_out_batches_without_a_label_are_refused_at_the_start(
    only_devices, write_config, tmp_path
):
    """A user who goes on and on: the first sequences hold nothing of the assistant's."""
    config = write_config(tmp_path)
    long = write_chats(tmp_path, range(3000, 3020), "yes", asked=200, holdout=0.5)
    flags = ["--data.path", str(long), "--train.global-batch-size", "4"]

    def made(*more: str) -> Run:
        with only_devices(1):
            return Run.open(read_config([config, *flags, *more]))

    with pytest.raises(
        ConfigError, match=r"evaluation.num_batches = 2: .* without a labeled token"
    ) as no:
        made()
    needed = int(re.search(r"--evaluation.num-batches (\d+)", no.value.fix)[1])
    assert needed > 2
    made("--evaluation.num-batches", str(needed))
    made("--evaluation.every", "0")
    with pytest.raises(ConfigError, match=f"num-batches {needed}"):
        made("--evaluation.num-batches", str(needed - 1))


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats"), QUESTIONS, ANSWER)


@pytest.mark.slow  # quicker: adapters learn the same chats in test_lora.py
@pytest.mark.usefixtures("quick_compile")
def test_it_learns_what_the_assistant_says(train_on, write_config, chats, tmp_path):
    config, quick = write_config(tmp_path), ["--evaluation.every", "0"]
    first = ["--train.num-steps", "20", "--checkpoint.every", "20"]
    assert train_on(2, config, *quick, *first) == 0
    tuned = tmp_path / "tuned"
    flags = ["--run.dir", str(tuned), "--run.init-from", str(tmp_path / "run")]
    flags += ["--data.path", str(chats), "--train.num-steps", "60", "--checkpoint.every", "60"]
    assert train_on(2, config, *quick, *flags) == 0
    steps = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
    losses = [step["loss"] for step in steps if "loss" in step]
    # Digits alone have over 2 nats: without the mark, no loss would come below 0.5.
    assert losses[0] > 2 and np.mean(losses[-5:]) < 0.1

    before, after = (load(str(run), None, 1, print) for run in (tmp_path / "run", tuned))
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before.weights, after.weights)
    assert all(jax.tree.leaves(moved))
    prompt = [int(i) for i in after.tokenizer.encode("user:\n17?\nassistant:\n")]
    greedy, size = Sampling(temperature=0.0), {"vocab_size": after.tokenizer.vocab_size}
    made = generate(
        after.weights,
        after.cfg,
        after.mesh,
        [prompt],
        greedy,
        max_tokens=len(ANSWER),
        stop=(),
        **size,
    )
    assert after.tokenizer.decode([i for (new,) in made for i in new]) == ANSWER


def test_the_config_is_that_of_the_shape_it_tunes():
    tuned, first = (load_config(name) for name in ("llama_1b_chat", "llama_1b"))
    assert tuned.model == first.model and tuned.parallel == first.parallel
    assert tuned.run.init_from and math.isclose(tuned.optimizer.learning_rate, 1e-5)
    assert replace(tuned, **{"data.path": first.data.path}).data == first.data
