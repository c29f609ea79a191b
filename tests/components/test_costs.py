"""What components cost, also those that somebody writes outside the package."""

import dataclasses
import math
from dataclasses import dataclass

import pytest

from jaxpar.components.component import FeedForward, Mixer
from jaxpar.components.costs import Projection
from jaxpar.components.model import Layer, Model
from jaxpar.components.weight import Weight, matrix, vector
from jaxpar.config import ModelConfig, replace
from jaxpar.config.config_file import load_config
from jaxpar.config.layout.composition import model_of
from jaxpar.config.validate import resolve
from jaxpar.execution.decisions import on_gpus
from jaxpar.model import flops
from jaxpar.planning.predict.communication import Cluster
from jaxpar.planning.predict.hardware import NETWORKS, gpu_named
from jaxpar.planning.predict.layer_kinds import layer_kinds
from jaxpar.planning.predict.memory import bytes_of_names, memory_of
from jaxpar.planning.predict.shard import shard_of
from jaxpar.planning.ranking import make_plan

D, VOCAB, H, K, F = 128, 1048, 4, 24, 384
CLUSTER = Cluster(gpu_named("h100"), NETWORKS["ib400"], 4, 8)


@dataclass(frozen=True, kw_only=True)
class Averages(Mixer):
    """Running averages of projections: a user's mixer, which declares its weights alone."""

    recurrent = True

    def weights(self, model: Model) -> dict[str, Weight]:
        by_head = ("heads", "head_dim")
        return {
            "avg_in": matrix((model.d_model, H, K), ("embed", *by_head), columns=2),
            "avg_rate": vector((H,), ("heads",)),
            "avg_out": matrix((H, K, model.d_model), (*by_head, "embed"), to_stream=True),
        }


@dataclass(frozen=True, kw_only=True)
class Sine(FeedForward):
    """W_out sin(W_in h), of a user."""

    def weights(self, model: Model) -> dict[str, Weight]:
        return {
            "sine_in": matrix((model.d_model, F), ("embed", "mlp")),
            "sine_out": matrix((F, model.d_model), ("mlp", "embed"), to_stream=True),
        }


@pytest.fixture
def composed():
    """A config whose even layers are a user's."""
    base = load_config("quickstart")
    plain = dataclasses.replace(model_of(base.model).layers[0], name="plain")
    layers = (Layer("own", Averages(), Sine()), plain) * 2
    model = ModelConfig(d_model=D, vocab_size=VOCAB, layers=layers)
    return replace(base, **{"model": model})


def test_a_users_components_have_flops(composed):
    """Worked out by hand: 6 for each parameter in matmuls, and pairs of the attention layers."""
    m, T = composed.model, 512
    own = 2 * D * H * K + H + 2 * D * F + 2 * D
    attention = D * (m.num_heads + 2 * m.num_kv_heads) * m.head_dim + m.num_heads * m.head_dim * D
    others = attention + 3 * D * m.d_ff + 2 * D
    assert flops.num_params(m) == 2 * own + 2 * others + D + VOCAB * D * (2 - m.tie_embeddings)
    pairs = 2 * 6 * m.num_heads * m.head_dim * T
    in_matmuls = 2 * own + 2 * others + D + VOCAB * D
    assert flops.train_flops_per_token(m, T) == 6 * in_matmuls + pairs
    assert flops.recurrence_flops_per_token(m) == 0


def test_a_users_components_have_matmuls_and_memory(composed):
    own, model = model_of(composed.model).layers[0], model_of(composed.model)
    assert own.mixer and own.feed_forward
    assert own.mixer.matmuls(model, 2) == {
        "qkv": [Projection(D, H * K / 2)],
        "wo": [Projection(H * K / 2, D)],
    }
    assert own.feed_forward.matmuls(model, 2)["gate_up"] == [Projection(D, F / 2)]
    assert own.feed_forward.hidden(model, 4) == (F / 4, F / 4)
    cfg = resolve(replace(composed, **{"parallel.data": 2, "parallel.remat": "none"}), 2)
    sizes = bytes_of_names(cfg, own)
    assert sizes["qkv"] == sizes["attn_out"] == H * K * sizes["attn_norm"] / D
    assert sizes["mlp_hidden"] == F * sizes["attn_norm"] / D and sizes["attn_lse"] == 0
    assert [(kind.layer.name, kind.share) for kind in layer_kinds(cfg)] == [
        ("own", 0.5),
        ("plain", 0.5),
    ]
    own_size = sum(math.prod(w.shape) for w in own.weights(model).values())
    others = sum(math.prod(w.shape) for w in model.layers[1].weights(model).values())
    assert shard_of(cfg).stack.everything == 2 * own_size + 2 * others
    assert memory_of(cfg).total > 0


def test_a_users_components_read_the_norm_as_it_is(composed):
    """Nothing that they do not know of is left to them."""
    cfg = resolve(replace(composed, **{"parallel.data": 2}), 2)
    as_is = resolve(replace(load_config("quickstart"), **{"parallel.data": 2}), 2)
    assert on_gpus(as_is).norm == "deferred_scale" and on_gpus(cfg).norm == "written"
    assert not on_gpus(cfg).fused_gate_up


def test_a_plan_lists_layouts_of_a_users_components(composed):
    plan = make_plan(composed, CLUSTER, coarse=True)
    assert len(plan.fitting) > 10
    assert any(layout.cfg.parallel.tensor == 2 for layout in plan.fitting)
    assert all(layout.memory.total > 0 and layout.time.total > 0 for layout in plan.fitting)
