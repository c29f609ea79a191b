"""Plans of runs whose steps change their size."""

import json
import shlex

import pytest

from jaxpar.commands import call
from jaxpar.config import BatchSize, SequenceLength, replace
from jaxpar.config.command_line import load_config
from jaxpar.config.fields import flag
from jaxpar.config.lists.step_sizes import config_of, step_sizes
from jaxpar.config.validate import resolve
from jaxpar.prediction.communication import Cluster
from jaxpar.prediction.hardware import H200, NETWORKS
from jaxpar.prediction.ranking import predict
from jaxpar.tools.planning.questions import cost_of, parts_of

FIELDS = {
    "train.num_steps": 300,
    "train.batch_schedule": (BatchSize(0, 8), BatchSize(100, 16)),
    "data.length_schedule": (SequenceLength(0, 2048), SequenceLength(50, 8192)),
    "parallel.num_microbatches": 2,
}
CLUSTER = Cluster(H200, NETWORKS["ib400"], 8, 8)


@pytest.fixture(scope="module")
def cfg():
    return resolve(replace(load_config("llama3_8b"), **FIELDS), 8)


def test_each_size_is_predicted_and_the_run_is_their_sum(cfg):
    layout = predict(cfg, CLUSTER)
    parts = parts_of(layout, CLUSTER, 300)
    assert [(part.size[1:], part.steps) for part in parts] == [
        ((32, 2048), 50),
        ((8, 8192), 50),
        ((16, 8192), 200),
    ]
    assert parts[-1].layout.time == layout.time
    assert parts[1].layout.time.total < layout.time.total < 2 * parts[1].layout.time.total
    assert layout.memory.total == max(part.layout.memory.total for part in parts)
    assert parts[0].layout.time.attention < parts[1].layout.time.attention
    tokens = step_sizes(cfg).tokens_before(300)
    found = cost_of(layout, CLUSTER, tokens)
    assert found.steps == 300
    assert found.seconds == pytest.approx(sum(part.seconds for part in parts))


def test_the_memory_is_of_the_size_that_needs_most(cfg):
    """Also if that is not the largest batch: here, one sequence per device has the most tokens."""
    cfg = resolve(replace(cfg, **{"parallel.remat": "full"}), 8)
    each = [predict(config_of(cfg, size), CLUSTER) for size in step_sizes(cfg).sizes]
    assert predict(cfg, CLUSTER).memory.total == max(one.memory.total for one in each)


def test_the_command_shows_every_size_and_the_whole_run(capsys):
    fields = shlex.split(" ".join(flag(path, value) for path, value in FIELDS.items()))
    words = ["llama3_8b", "--quick", "--top", "1", "--fix", "data=8,remat=dots,zero=3", *fields]
    assert call("plan", words) == 0
    said = capsys.readouterr().out
    assert "Sizes of the steps, on layout 1" in said
    assert "Whole run: 300 steps, 32,768,000 tokens" in " ".join(said.split())
    assert call("plan", [*words, "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert [(one["global_batch_size"], one["steps"]) for one in sizes] == [
        (32, 50),
        (8, 50),
        (16, 200),
    ]
