"""Rules and small forms of components, which follow from the axes of their weights."""

import dataclasses
import math
from typing import Any

import pytest

from jaxpar.components.attention import Attention
from jaxpar.components.component import FeedForward, Mixer, component
from jaxpar.components.dims import SmallSizes, dims_of
from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Glu
from jaxpar.components.model import Layer, Model
from jaxpar.components.weight import Weight, matrix
from jaxpar.config import Config, ConfigError, ParallelConfig, replace, value_of
from jaxpar.config.config_file import load_config
from jaxpar.config.layout.composition import model_of
from jaxpar.config.rules import divisibility
from tests.step.figures_of import names

SHIPPED = names()

MESHES = [
    ParallelConfig(data=2, tensor=2),
    ParallelConfig(data=1, sequence=2, tensor=4),
    ParallelConfig(data=1, sequence=2, tensor=2, context="ulysses"),
    ParallelConfig(data=2, expert=2, pipeline=2),
    ParallelConfig(data=1, expert=2, tensor=2, expert_tensor=1),
]


@component
class Squared(Mixer):
    """A user's: heads of two kinds of widths, and a latent."""

    readers: int
    width: int
    latent: int
    steps: int = 7

    def weights(self, model: Model) -> dict[str, Weight]:
        into = matrix((model.d_model, self.latent), ("embed", "rank"))
        heads = self.latent, self.readers, self.width
        read = matrix(heads, ("latent", "heads", "head_dim"), columns=2)
        out = matrix((*heads[1:], model.d_model), ("heads", "head_dim", "embed"), to_stream=True)
        return {"into": into, "read": read, "out": out}


@component
class Doubled(FeedForward):
    """A user's: of hidden units that are twice a field."""

    units: int

    def weights(self, model: Model) -> dict[str, Weight]:
        shape = model.d_model, 2 * self.units
        return {
            "into": matrix(shape, ("embed", "mlp")),
            "out": matrix(shape[::-1], ("mlp", "embed"), to_stream=True),
        }


OWN = Layer("own", Squared(readers=6, width=40, latent=96), Doubled(units=31))
MODEL = Model(d_model=256, vocab_size=128, layers=(OWN,))


def small_layers(model: Model) -> list[tuple[Layer, Layer]]:
    sizes = SmallSizes.of(model, 64, 1 / 64, MESHES)
    return [(layer, layer.shrunk(sizes)) for layer in dict.fromkeys(model.layers)]


def num_weights(layer: Layer, model: Model) -> int:
    return sum(math.prod(w.shape) for w in layer.weights(model).values())


@pytest.mark.parametrize("name", SHIPPED)
def test_small_layers_of_shipped_configs(name):
    """They have the same weights, are smaller, and all meshes divide them."""
    model = model_of(load_config(name).model)
    model = dataclasses.replace(model, d_model=max(model.d_model, 64))
    small_model = dataclasses.replace(model, d_model=64)
    for layer, small in small_layers(model):
        before, after = layer.weights(model), small.weights(small_model)
        assert list(before) == list(after)
        assert all(w.axes == after[n].axes for n, w in before.items())
        assert num_weights(small, small_model) <= num_weights(layer, model)
        for mesh in MESHES:
            assert all(rule.ok for rule in small.rules(small_model, mesh))
        if isinstance(layer.mixer, Attention) and isinstance(small.mixer, Attention):
            groups = layer.mixer.num_heads // layer.mixer.num_kv_heads
            assert small.mixer.num_heads == groups * small.mixer.num_kv_heads
            assert small.mixer.rotary_dims % 2 == 0
        if isinstance(layer.feed_forward, Experts) and isinstance(small.feed_forward, Experts):
            assert small.feed_forward.num_experts <= max(8, 2 * small.feed_forward.router.groups)
            assert small.feed_forward.num_shared_experts == layer.feed_forward.num_shared_experts


def test_a_component_of_ones_own():
    ((_, small),) = small_layers(MODEL)
    assert small.mixer == Squared(readers=4, width=10, latent=24, steps=7)
    assert small.feed_forward == Doubled(units=8)
    small_model = dataclasses.replace(MODEL, d_model=64)
    assert all(rule.ok for mesh in MESHES for rule in small.rules(small_model, mesh))


def test_which_fields_make_a_dim():
    mixer, model = OWN.mixer, MODEL
    assert mixer is not None
    found = {(d.weight, d.axis): d.fields for d in dims_of(mixer, model)}
    assert found["read", "latent"] == ("latent",)
    assert found["out", "heads"] == ("readers",)
    assert found["out", "embed"] == ("d_model",)
    experts = Experts(expert=Glu(d_ff=32), num_experts=4, experts_per_token=2)
    found = {(d.weight, d.axis): d.fields for d in dims_of(experts, model)}
    assert found["w_down", "mlp"] == ("expert.d_ff",)
    assert found["w_down", "experts"] == ("num_experts",)


def broken(model: Model, parallel: ParallelConfig) -> dict[str, Any]:
    return {rule.field: rule for rule in model.rules(parallel) if not rule.ok}


def test_rules_of_a_component_of_ones_own():
    found = broken(MODEL, ParallelConfig(data=1, tensor=4))
    assert found.keys() == {"own.mixer.readers", "own.feed_forward.units"}
    rule = found["own.mixer.readers"]
    assert rule.rule == "must be divisible by parallel.tensor = 4"
    assert rule.fixes == (("parallel.tensor", 3), ("own.mixer.readers", 8))
    rule = found["own.feed_forward.units"]  # 62 units
    assert rule.fixes == (("parallel.tensor", 2), ("own.feed_forward.units", 32))
    assert broken(MODEL, ParallelConfig(data=128)).keys() == {"own.mixer.latent"}


def test_every_fix_helps():
    for mesh in (ParallelConfig(data=1, tensor=4), ParallelConfig(data=128)):
        for rule in broken(MODEL, mesh).values():
            for path, value in rule.fixes:
                section, _, field = path.rpartition(".")
                if section == "parallel":
                    fixed = broken(MODEL, dataclasses.replace(mesh, **{field: value}))
                else:
                    role = section.removeprefix("own.")
                    term = dataclasses.replace(getattr(OWN, role), **{field: value})
                    layers = (dataclasses.replace(OWN, **{role: term}),)
                    fixed = broken(dataclasses.replace(MODEL, layers=layers), mesh)
                assert rule.field not in fixed


MESHES_OF_RULES = [
    {"data": 1, "tensor": 3},
    {"data": 1, "tensor": 16},
    {"data": 3},
    {"data": 1, "sequence": 5},
    {"data": 1, "expert": 7},
    {"data": 1, "expert": 2, "tensor": 3, "expert_tensor": 1},
    {"data": 1, "sequence": 2, "tensor": 8, "context": "ulysses"},
    {"data": 1, "sequence": 3, "tensor": 5, "context": "ulysses"},
    {"data": 1, "pipeline": 3, "tensor": 2},
]


#: Fields of components, by the flags that have other names.
FIELDS = {
    "num_kv_heads": ("num_kv_heads", "num_heads"),
    "global_num_kv_heads": ("num_kv_heads",),
    "linear_num_key_heads": ("num_key_heads", "num_heads"),
    "linear_value_head_dim": ("value_head_dim",),
    "mamba_num_groups": ("num_groups",),
}


#: Models of flags, with each kind of layer.
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "experts": {"num_experts": 6, "num_shared_experts": 1},
    "latent": {"num_kv_heads": 8, "head_dim": 48, "kv_lora_rank": 64, "q_lora_rank": 32}
    | {"qk_rope_head_dim": 16, "v_head_dim": 32},
    "delta": {"layer_pattern": "GGG*"},
    "kimi": {"layer_pattern": "K*"},
    "mamba": {"layer_pattern": "M*"},
    "global": {"layer_pattern": "*A", "sliding_window": 8, "global_num_kv_heads": 2},
}


@pytest.mark.parametrize("name", FLAGS)
def test_components_refuse_what_flags_refuse(name):
    """Every row of the table on layers, of float32: how matrices are multiplied is no matter of
    the model. Whole experts have complete hidden units, which the table divides all the same."""
    cfg = replace(Config(), **{f"model.{field}": value for field, value in FLAGS[name].items()})
    refused = 0
    for mesh in MESHES_OF_RULES:
        on_mesh = dataclasses.replace(cfg, parallel=ParallelConfig(**mesh))
        rows = {
            row.path
            for row in divisibility._divisions(on_mesh)
            if row.path.startswith("model.")
            and row.path not in divisibility.OF_MODEL
            and value_of(on_mesh, row.path) % row.divisor(on_mesh)
        }
        if "expert_tensor" in mesh and cfg.model.num_experts:
            rows -= {"model.d_ff"}
        refused += len(rows)
        fields = {
            field.rpartition(".")[2] for field in broken(model_of(cfg.model), on_mesh.parallel)
        }
        for row in rows:
            name = row.removeprefix("model.")
            assert fields & set(FIELDS.get(name, (name,))), (mesh, row, fields)
    assert refused


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        ({"d_model": 250}, {"data": 4}),
        ({"vocab_size": 127}, {"tensor": 2}),
        ({"max_positions": 255}, {"pipeline": 2}),
    ],
)
def test_sizes_of_a_model_divide(sizes, mesh):
    """Once for all models: components have rules about their own fields."""
    model = dataclasses.replace(load_config("quickstart").model, **sizes)
    cfg = dataclasses.replace(load_config("quickstart"), model=model)
    on_mesh = dataclasses.replace(cfg, parallel=ParallelConfig(**({"data": 1} | mesh)))
    with pytest.raises(ConfigError, match=f"{next(iter(sizes))} = .*must be divisible") as error:
        divisibility.divisibility(on_mesh)
    assert error.value.field.removeprefix("model.") not in broken(model_of(model), on_mesh.parallel)
