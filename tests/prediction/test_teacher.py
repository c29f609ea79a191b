"""What the plan counts of a teacher in memory."""

import dataclasses
from pathlib import Path

import pytest

from jaxpar.commands import call
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.config_file import load_config
from jaxpar.config.serialize import to_json
from jaxpar.config.validate import resolve
from jaxpar.model.flops import num_matmul_params, num_params
from jaxpar.prediction.communication import Cluster
from jaxpar.prediction.hardware import GPUS, NETWORKS
from jaxpar.prediction.memory import memory_of
from jaxpar.prediction.ranking import make_plan
from jaxpar.prediction.startup import check_host
from jaxpar.prediction.time import step_time

CLUSTER = Cluster(GPUS["h200"], NETWORKS["ib400"], 8, 8)


@pytest.fixture
def teacher(tmp_path) -> Path:
    """The folder of a run of an 8B model, as far as the plan reads it."""
    (tmp_path / "config.json").write_text(to_json(load_config("llama3_8b")))
    return tmp_path


def student(**fields) -> Config:
    """A small model on eight GPUs."""
    layout = {"parallel.data": 4, "parallel.tensor": 2, "parallel.zero": 3}
    return resolve(replace(load_config("llama_1b"), **{**layout, **fields}), 8)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_weights_and_batch(zero, pipeline, teacher):
    """4 bytes of each parameter in equal parts, also with LoRA; 8 bytes of each kept token."""
    mesh = {"parallel.pipeline": pipeline, "parallel.data": 4 // pipeline, "parallel.zero": zero}
    mesh |= {"parallel.num_microbatches": pipeline, "lora.rank": 4}
    told = {"distill.teacher": str(teacher), "distill.top_k": 1024}
    live, kept = student(**mesh, **told), student(**mesh, **told, **{"distill.cache": "data/x"})
    few = student(**mesh, **(told | {"distill.top_k": 1, "distill.cache": "data/x"}))
    params = num_params(load_config("llama3_8b").model)
    beside = memory_of(live).weights - memory_of(kept).weights
    assert beside == pytest.approx(4 * params / 8, rel=1e-3)
    tokens = live.train.global_batch_size * live.data.seq_len / (4 // pipeline)
    assert memory_of(kept).buffers - memory_of(few).buffers == 8 * 1023 * tokens


def test_its_forward_pass_may_be_the_peak(teacher):
    """A student with little to train: weights that ZeRO-1 gathers, and a chunk of logits."""
    small = {"model.num_layers": 1, "model.d_model": 256, "parallel.zero": 1}
    small |= {"model.layers.feed_forward.d_ff": 512}
    memory = memory_of(student(**small, **{"distill.teacher": str(teacher)}))
    params = num_params(load_config("llama3_8b").model)
    assert memory.moment == "frozen model" and memory.gradients == 0
    assert memory.gathered == pytest.approx(2 * params / 2, rel=0.1)
    assert memory.total > memory_of(student(**small)).total + 4 * params / 8


def test_its_time(teacher):
    """A forward pass: at least its FLOPs at the peak, and less than half of its step."""
    live, alone = student(**{"distill.teacher": str(teacher)}), student()
    time, plain = step_time(live, CLUSTER), step_time(alone, CLUSTER)
    model = load_config("llama3_8b").model
    tokens = live.train.global_batch_size * live.data.seq_len / 8
    least = 2 * num_matmul_params(model) * tokens / CLUSTER.gpu.peak.value
    whole = step_time(resolve(replace(live, **{"model": model, "distill": None}), 8), CLUSTER)
    assert least < time.frozen < whole.total / 2 and plain.frozen == 0
    assert dataclasses.replace(time, frozen=0.0).total == pytest.approx(time.total - time.frozen)
    kept = student(**{"distill.teacher": str(teacher), "distill.cache": "data/x"})
    assert step_time(kept, CLUSTER).frozen == 0


def test_layouts_that_do_not_divide_it_are_refused(teacher):
    """A student of 16 KV heads and a teacher of 8, over 16 ranks."""
    cfg = replace(
        load_config("llama_1b"),
        **{"distill.teacher": str(teacher), "model.layers.mixer.num_kv_heads": 16},
    )
    found = make_plan(cfg, Cluster(GPUS["h200"], NETWORKS["ib400"], 16, 8), {"tensor": 16})
    said = [str(error) for error in found.examples.values()]
    assert not found.fitting and any("has a model that this mesh cannot run" in s for s in said)


def test_a_host_without_its_memory_is_refused(teacher):
    cfg = student(**{"distill.teacher": str(teacher)})
    enough = 8 * memory_of(student(), on_reference=True).total * 1.2
    with pytest.raises(ConfigError, match="GiB of memory for 8 CPU devices"):
        check_host(cfg, 8, int(enough))


def test_an_unknown_teacher_is_refused(tmp_path):
    words = ["llama_1b", "--distill.teacher", str(tmp_path / "none")]
    with pytest.raises(ConfigError, match=r"a model that the plan cannot count: .*no config.json"):
        call("plan", words)
