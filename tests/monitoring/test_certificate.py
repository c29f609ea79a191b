"""A certificate: its file, and each reason why it no longer applies."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxpar.config import Config, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.config_file import import_file, load_config
from jaxpar.config.fields import field_types
from jaxpar.config.json_reader import UnreadableJson
from jaxpar.monitoring import certificate as certificates
from jaxpar.monitoring.certificate import (
    Certificate,
    Conditions,
    Result,
    conditions_of,
    read_certificate,
    reasons_against,
    to_values,
)
from jaxpar.runtime.gpus import xla_flags

FOUND = Result("meshes", "data=2", "gradient", 1e-6, 1e-5, where="embed")


def made(cfg: Config, *results: Result) -> Certificate:
    return Certificate.of("mine", cfg, conditions_of(cfg), results or (FOUND,))


def as_read(one: Certificate) -> Certificate:
    return read_certificate(json.dumps(to_values(one)).encode())


@pytest.fixture(autouse=True)
def without_flags(monkeypatch) -> None:
    for name in ("XLA_FLAGS", *certificates.VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cfg() -> Config:
    return load_config("quickstart")


def test_it_applies_where_it_was_made(cfg):
    written = made(cfg)
    one = as_read(written)
    assert one == written
    assert reasons_against(one, cfg, conditions_of(cfg)) == []
    assert one.cpu_seconds > 0 and one.conditions.jax == jax.__version__
    assert len(one.conditions.sources["jaxpar/step"]) == 64
    assert not any("tools" in name for name in one.conditions.sources)


def test_a_distance_that_is_no_number_fails_and_can_be_read(cfg):
    one = made(cfg, FOUND, dataclasses.replace(FOUND, distance=math.nan))
    text = json.dumps(to_values(one), allow_nan=False)
    back = read_certificate(text.encode())
    assert back.results[1].distance == math.inf and not back.results[1].passed
    (why,) = reasons_against(back, cfg, conditions_of(cfg))
    assert why.startswith("it failed: data=2: gradient of embed is off by inf")


def test_what_compares_nothing_certifies_nothing(cfg):
    one = made(cfg, Result("meshes", "data=2", "mesh", not_run="too large"))
    assert reasons_against(one, cfg, conditions_of(cfg)) == ["it compares nothing"]
    assert not one.has("meshes") and str(one).endswith("0 of 0 comparisons passed, 1 not run")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("jax", "0.99.0", f"JAX is 0.99.0, was {jax.__version__}"),
        ("jaxlib", "0.99.0", "jaxlib is 0.99.0, was "),
        ("gpu", "NVIDIA H200", "the GPU is NVIDIA H200, was none"),
        ("driver", "999.1", "the driver is 999.1, was none"),
        ("flags", {"xla_cpu_enable_fast_math": "true"}, "flag xla_cpu_enable_fast_math is true"),
    ],
)
def test_other_conditions(cfg, name, value, said):
    now: Conditions = dataclasses.replace(conditions_of(cfg), **{name: value})
    (why,) = reasons_against(as_read(made(cfg)), cfg, now)
    assert why.startswith(said)


def test_flags_are_the_users(cfg, monkeypatch):
    one = made(cfg)
    monkeypatch.setattr(xla_flags, "_set_here", ["--xla_gpu_ours=true", "NCCL_ALGO=Ring"])
    ours = "--xla_gpu_ours=true --xla_dump_to=here"
    monkeypatch.setenv("XLA_FLAGS", ours)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert reasons_against(one, cfg, conditions_of(cfg)) == []
    monkeypatch.setenv("XLA_FLAGS", f"{ours} --xla_gpu_theirs=2")
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "bfloat16")
    assert reasons_against(one, cfg, conditions_of(cfg)) == [
        "flag JAX_DEFAULT_MATMUL_PRECISION is bfloat16, was not set",
        "flag xla_gpu_theirs is 2, was not set",
    ]


def test_another_source_of_the_package(cfg):
    one, now = as_read(made(cfg)), conditions_of(cfg)
    changed = {**now.sources, "jaxpar/step": "0" * 64, "jaxpar/new": "1"}
    del changed["jaxpar/model"]
    assert reasons_against(one, cfg, dataclasses.replace(now, sources=changed)) == [
        "the source of jaxpar/model is gone",
        "the source of jaxpar/step has changed",
        "the source of jaxpar/new is new",
    ]


def test_a_changed_file_of_the_package_is_noticed(tmp_path, monkeypatch):
    for name in ("a/one.py", "a/__pycache__/one.pyc", "tools/two.py", "root.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(certificates.jaxpar, "__file__", str(tmp_path / "__init__.py"))
    digests = certificates._package_sources.__wrapped__
    before = digests()
    assert before.keys() == {"jaxpar", "jaxpar/a"}
    (tmp_path / "a/one.py").write_text("x = 2\n")
    (tmp_path / "tools/two.py").write_text("x = 2\n")
    after = digests()
    assert before["jaxpar"] == after["jaxpar"] and before["jaxpar/a"] != after["jaxpar/a"]


OWN = """
import jax.numpy as jnp
from jaxpar import Loss, load_config
from jaxpar.config import replace
from jaxpar.extend import FeedForward, Layer, Weight, component
from {helper} import scale


class Mine(Loss):
    def __call__(self, scores, batch):
        return scores.logsumexp() - scores.label()


@component
class Scale(FeedForward):
    def weights(self, model):
        return {{}}

    def compute(self, x, w, tokens):
        return scale(x)


def get_config():
    cfg = load_config("quickstart")
    (first, *rest) = cfg.model.layers
    own = Layer("own", first.mixer, Scale())
    return replace(cfg, **{{"model.layers": (own, *rest), "train.loss": Mine()}})
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> Callable[[], Config]:
    """() -> a config with a component and a loss of a user's file, which imports another file."""
    helper = f"helper_of_{tmp_path.name.replace('-', '_')}"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{helper}.py").write_text("def scale(x):\n    return 2 * x\n")
    file = tmp_path / "mine.py"
    file.write_text(OWN.format(helper=helper))
    yield lambda: import_file(str(file)).get_config()
    sys.modules.pop(helper, None)


def test_another_source_of_a_users_component(own, tmp_path):
    cfg = own()
    one = as_read(made(cfg))
    helper = next(name for name in one.conditions.sources if name.startswith("helper_of"))
    assert one.conditions.sources.keys() >= {"mine.py", helper}
    assert reasons_against(one, own(), conditions_of(own())) == []

    file = tmp_path / "mine.py"
    file.write_text(file.read_text().replace("return scale(x)", "return scale(x) + 1"))
    assert reasons_against(one, own(), conditions_of(own())) == [
        "the source of mine.py has changed"
    ]
    file.write_text(file.read_text().replace("return scale(x) + 1", "return scale(x)"))
    Path(tmp_path, f"{helper}.py").write_text("def scale(x):\n    return 3 * x\n")
    assert reasons_against(one, own(), conditions_of(own())) == [
        f"the source of {helper} has changed"
    ]


def test_fields(cfg):
    one, now = as_read(made(cfg)), conditions_of(cfg)
    free = {"train.num_steps": 7, "optimizer.learning_rate": 1.0, "train.log_every": 3}
    free |= {"run.dir": "elsewhere", "evaluation.every": 9}
    assert reasons_against(one, replace(cfg, **free), now) == []
    others = {"compute.dtype": "float16", "model.layers.feed_forward.d_ff": 64, "train.seed": 5}
    said = reasons_against(one, replace(cfg, **others), now)
    assert [line.split(" is ")[0] for line in said] == [
        "train.seed",
        "model.layers.feed_forward.d_ff",
        "compute.dtype",
    ]
    assert said[0] == f"train.seed is 5, was {cfg.train.seed}"
    (why,) = reasons_against(one, replace(cfg, **{"model.num_layers": 9}), now)
    assert why.startswith("model.layers is ")


def test_what_follows_from_the_devices_is_no_reason(cfg):
    one, now = as_read(made(cfg)), conditions_of(cfg)
    filled = replace(cfg, **{"parallel.data": 1, "parallel.zero": 1})
    assert reasons_against(one, filled, now, devices=1) == []
    split = replace(cfg, **{"parallel.data": 1, "parallel.tensor": 2})
    assert reasons_against(one, split, now, devices=2) == [
        "parallel.data is 1, was -1",
        "parallel.tensor is 2, was 1",
    ]


def test_lists_and_layers_are_compared_whatever_the_devices(cfg):
    one, now = as_read(made(cfg)), conditions_of(cfg)
    wide = {"model.layers.feed_forward.d_ff": 64, "parallel.data": 1}
    (why,) = reasons_against(one, replace(cfg, **wide), now, devices=1)
    assert why.startswith("model.layers.feed_forward.d_ff is 64, was ")
    listed = parse_overrides(cfg, ["--train.batch-schedule", "5:64"])
    (why,) = reasons_against(one, listed, now, devices=1)
    assert why.startswith("train.batch_schedule is 5:64, was ")


def test_the_free_fields_exist():
    known = field_types()
    for free in certificates.FREE:
        assert free in known or any(path.startswith(f"{free}.") for path in known), free


@pytest.mark.parametrize("text", ["[]", '{"results": 5}', '{"results": [{"distance": null}]}'])
def test_other_files_are_refused(text):
    with pytest.raises(UnreadableJson):
        read_certificate(text.encode())
