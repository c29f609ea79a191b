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
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.components.model import Layer, Model
from jaxpar.components.recurrent import GatedDeltaNet, KimiDeltaAttention, Mamba2
from jaxpar.components.weight import Weight, matrix
from jaxpar.config import ConfigError, ParallelConfig
from jaxpar.config.config_file import load_config
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
    model = load_config(name).model
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


MESHES_OF_RULES: list[dict[str, Any]] = [
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


HEADS, SHARDED = ("tensor",), ("data", "expert", "sequence")
DELTA = GatedDeltaNet(num_key_heads=4, num_value_heads=8, key_head_dim=32, value_head_dim=32)
LATENT = LatentAttention(
    num_heads=8,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    kv_lora_rank=64,
    q_lora_rank=32,
)

#: Each kind of component, and by which axes the size that a field makes is divided.
DIVIDED: list[tuple[Mixer | FeedForward, dict[str, tuple[int, tuple[str, ...]]]]] = [
    (
        Attention(num_heads=8, num_kv_heads=4, head_dim=32),
        {"num_heads": (8, HEADS), "num_kv_heads": (4, HEADS)},
    ),
    (
        LATENT,
        {"num_heads": (8, HEADS), "kv_lora_rank": (64, SHARDED), "q_lora_rank": (32, SHARDED)},
    ),
    (DELTA, {"num_key_heads": (4, HEADS), "num_value_heads": (8, HEADS)}),
    (
        KimiDeltaAttention(num_heads=4, key_head_dim=32, value_head_dim=32),
        {"num_heads": (4, HEADS), "value_head_dim": (32, SHARDED)},
    ),
    (
        Mamba2(num_heads=8, head_dim=32, state_size=32),
        {"num_heads": (8, HEADS), "num_groups": (1, HEADS)},
    ),
    (Glu(704), {"d_ff": (704, HEADS)}),
    (
        Experts(expert=Glu(704), num_experts=6, experts_per_token=2, num_shared_experts=1),
        {
            "num_experts": (6, ("expert",)),
            "num_shared_experts": (704, HEADS),
            "expert.d_ff": (704, HEADS),
        },
    ),
]


@pytest.mark.parametrize(
    ("part", "divided"), DIVIDED, ids=[type(part).__name__ for part, _ in DIVIDED]
)
def test_what_axes_do_not_divide_is_refused(part, divided):
    """And nothing else. Ulysses divides the heads of softmax attention by both of its axes."""
    role = "mixer" if isinstance(part, Mixer) else "feed_forward"
    layer = dataclasses.replace(Layer("own", None, None), **{role: part})
    refused = 0
    for mesh in MESHES_OF_RULES:
        by_both = mesh.get("context") == "ulysses" and isinstance(part, Attention | LatentAttention)
        wanted = {
            f"own.{role}.{field}"
            for field, (size, axes) in divided.items()
            if size % math.prod(mesh.get(axis, 1) for axis in axes)
            or (field == "num_heads" and by_both and size % (mesh["sequence"] * mesh["tensor"]))
        }
        model = dataclasses.replace(MODEL, layers=(layer,))
        assert broken(model, ParallelConfig(**mesh)).keys() == wanted, mesh
        refused += len(wanted)
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
    assert error.value.field.removeprefix("model.") not in broken(model, on_mesh.parallel)
