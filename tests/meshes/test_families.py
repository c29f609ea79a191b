"""A tiny model of each published family: the plain model's loss and gradients on three meshes."""

import dataclasses
import functools
import math
from typing import Any

import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.components.attention import Attention
from jaxpar.components.experts import experts_in
from jaxpar.components.model import Layer
from jaxpar.components.recurrent import Recurrent
from jaxpar.config import Config, replace
from jaxpar.config.lists.lora_targets import targets_of
from jaxpar.config.validate import resolve
from jaxpar.convert.hf.config import family_of, model_of
from jaxpar.convert.hf.families import FAMILIES
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from tests import weights
from tests.convert import tiny
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

#: Tensor, sequence and pipeline parallelism, each beside another axis.
DENSE = (
    "data=2,tensor=2",
    "sequence=2,tensor=2,context=ring",
    "pipeline=2,num_microbatches=2,tensor=2,zero=1",
)
#: The same beside the expert axis.
EXPERTS = (
    "expert=2,tensor=2",
    "expert=2,sequence=2",
    "pipeline=2,num_microbatches=2,expert=2,zero=1",
)


def kind_of(values: dict) -> tuple[str, bool]:
    """The family of a model, and whether it has experts."""
    family = family_of(values)
    return family.model_type, bool(experts_in(model_of(values, family)))


#: One model of each kind; the other models differ in what other tests compare.
MODELS = {kind_of(values): name for name, values in tiny.MODELS.items()}


def config_of(name: str) -> Config:
    """The tiny model in float32, with a window and a stretched RoPE within the short sequence."""
    values = tiny.MODELS[name]
    m = model_of(values, family_of(values))
    layers = [dataclasses.replace(x, mixer=changed(x.mixer)) for x in m.layers]
    if any(isinstance(x.mixer, Recurrent) for x in layers):  # each stage has all kinds
        layers = [*layers[: period(layers)]] * 2
    fields: dict = {"compute.dtype": "float32", "compute.attention_backend": "reference"}
    fields |= {"model.init_std": 0.2, "parallel.layer_loop": "unroll"}
    if experts_in(m):
        fields["train.balance_loss"] = 1e-2
    return replace(TINY, model=m.with_layers(layers), **fields)


def period(layers: list[Layer]) -> int:
    """After how many layers all are repeated."""
    count = len(layers)
    return next(n for n in range(1, count + 1) if layers == layers[:n] * (count // n))


def changed(mixer: Any) -> Any:
    fields: dict[str, Any] = {}
    if isinstance(mixer, Recurrent):  # as that of all hybrids: tests/convert/tiny_hybrids.py
        return dataclasses.replace(mixer, norm_eps=0.1)
    if mixer is None:
        return None
    if mixer.window is not None:
        fields["window"] = 5
    if mixer.chunk is not None:
        fields["chunk"] = 5
    scaling = mixer.rope and mixer.rope.scaling
    if scaling and scaling.kind not in ("linear", "proportional"):
        scaling = dataclasses.replace(scaling, original_max_position=8)
        fields["rope"] = dataclasses.replace(mixer.rope, scaling=scaling)
    if isinstance(mixer, Attention):
        if mixer.growth:
            fields["growth"] = dataclasses.replace(mixer.growth, span=4)
        if mixer.num_kv_heads == 1:  # meshes have two tensor ranks
            fields["num_kv_heads"] = 2
        if mixer.scale is not None and mixer.qk_norm:  # large scores amplify rounding
            fields["scale"] = 0.2
    return dataclasses.replace(mixer, **fields)


def meshes_of(name: str) -> tuple[str, ...]:
    return EXPERTS if experts_in(config_of(name).model) else DENSE


@functools.cache
def reference_of(cfg: Config) -> tuple:
    batch = traces.random_batch(cfg, 0)
    return batch, weights.plain_gradients(cfg, batch)


def test_every_family_has_a_model():
    """Or another one with its class, as Kimi K2 has that of DeepSeek-V3."""
    tested = {family_of(tiny.MODELS[name]).architecture for name in MODELS.values()}
    assert {family.architecture for family in FAMILIES} == tested


ADAPTED = list(MODELS.values())

CASES = [(name, mesh) for name in MODELS.values() for mesh in meshes_of(name)]


@pytest.mark.slow  # quicker: convert/test_goldens.py; on meshes, test_layer_kinds.py
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_gradients(name, mesh, devices):
    compare(config_of(name), mesh, devices)


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED)
def test_gradients_of_adapters(name, devices):
    targets = targets_of(config_of(name).model)
    cfg = replace(config_of(name), **{"lora.rank": 2, "lora.targets": tuple(targets)})
    compare(replace(cfg, **{"train.balance_loss": 0.0}), meshes_of(name)[0], devices)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "targets", "mesh"),
    [
        ("qwen3_5", "q_proj", "pipeline=2,num_microbatches=2,layer_loop=scan"),
        ("qwen3_5", "q_proj,out_proj", DENSE[2]),
        ("qwen3_5", "in_proj", "pipeline=2,num_microbatches=2,layer_loop=scan"),
        ("deepseek_v2", "gate_proj", EXPERTS[2]),
        ("dots1", "up_proj", "pipeline=2,num_microbatches=2,data=2,zero=2"),
        ("nemotron_h", "v_proj,up_proj", "data=2,zero=2,layer_loop=unroll"),
        ("deepseek_v2", "o_proj,kv_b_proj", EXPERTS[2]),
        ("dots1", "q_proj,o_proj", "pipeline=2,num_microbatches=2,data=2,zero=2"),
    ],
)
def test_gradients_of_adapters_in_some_stacks(name, targets, mesh, devices):
    """Also where a stack has none, and before the stages of a pipeline."""
    cfg = replace(config_of(name), **{"lora.rank": 2, "lora.targets": tuple(targets.split(","))})
    compare(replace(cfg, **{"train.balance_loss": 0.0}), mesh, devices)


def gradients_of(cfg: Config, mesh: str, devices) -> tuple:
    """Traces of loss and gradients on a mesh, and of the plain model."""
    parallel = parse_meshes([mesh], cfg.parallel)[mesh]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batch, wanted = reference_of(cfg)
    return weights.first_gradients(on_mesh, make_mesh(parallel, devices[:n]), batch), wanted


def compare(cfg: Config, mesh: str, devices) -> None:
    found, wanted = gradients_of(cfg, mesh, devices)
    zero = distances.zero_gradients(cfg.model)
    assert not distances.compare(found, wanted, TOLERANCE, zero).mismatches()
