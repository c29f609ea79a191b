"""What components cost, also those that somebody writes outside the package."""

import math

from jaxpar.components.costs import Projection
from jaxpar.config import Config, replace
from jaxpar.config.config_file import load_config
from jaxpar.config.validate import resolve
from jaxpar.execution.decisions import on_gpus
from jaxpar.extend import (
    Attention,
    FeedForward,
    Glu,
    Layer,
    Mixer,
    Model,
    component,
    matrix,
    vector,
)
from jaxpar.model import flops
from jaxpar.prediction.communication import Cluster
from jaxpar.prediction.hardware import NETWORKS, gpu_named
from jaxpar.prediction.layer_kinds import layer_kinds
from jaxpar.prediction.memory import bytes_of_names, memory_of
from jaxpar.prediction.ranking import make_plan
from jaxpar.prediction.shard import shard_of, state_bytes

D, VOCAB, H, K, F = 128, 1048, 4, 24, 384
CLUSTER = Cluster(gpu_named("h100"), NETWORKS["ib400"], 4, 8)


@component
class Averages(Mixer):
    """Running averages of projections: a user's mixer, which declares its weights alone."""

    def weights(self, model):
        by_head = ("heads", "head_dim")
        return {
            "avg_in": matrix((model.d_model, H, K), ("embed", *by_head), columns=2),
            "avg_rate": vector((H,), ("heads",)),
            "avg_out": matrix((H, K, model.d_model), (*by_head, "embed"), to_stream=True),
        }


@component
class Sine(FeedForward):
    """W_out sin(W_in h), of a user."""

    def weights(self, model):
        return {
            "sine_in": matrix((model.d_model, F), ("embed", "mlp")),
            "sine_out": matrix((F, model.d_model), ("mlp", "embed"), to_stream=True),
        }


def composed(*own: Layer) -> Config:
    """The quickstart with layers of attention, each after one of a user."""
    base = load_config("quickstart")
    attends = Layer("attends", Attention(num_heads=4, num_kv_heads=2, head_dim=32), Glu(d_ff=F))
    model = Model(d_model=D, vocab_size=VOCAB, layers=[*own, attends] * 2)
    return replace(base, model=model)


OWN = composed(Layer("own", Averages(), Sine()))


def test_a_users_components_have_flops():
    """Worked out by hand: 6 for each parameter in matmuls, and pairs of the attention layers."""
    m, T = OWN.model, 512
    own = 2 * D * H * K + H + 2 * D * F + 2 * D
    others = D * (4 + 2 * 2) * 32 + 4 * 32 * D + 3 * D * F + 2 * D
    assert flops.num_params(m) == 2 * own + 2 * others + D + 2 * VOCAB * D
    pairs = 2 * 6 * 4 * 32 * T
    in_matmuls = 2 * own + 2 * others + D + VOCAB * D
    assert flops.train_flops_per_token(m, T) == 6 * in_matmuls + pairs
    assert flops.recurrence_flops_per_token(m) == 0


def test_a_users_components_have_matmuls_and_memory():
    own, model = OWN.model.layers[0], OWN.model
    assert own.mixer and own.feed_forward
    assert own.mixer.matmuls(model, 2) == {
        "qkv": [Projection(D, H * K / 2)],
        "wo": [Projection(H * K / 2, D)],
    }
    assert own.feed_forward.matmuls(model, 2)["gate_up"] == [Projection(D, F / 2)]
    assert own.feed_forward.hidden(model, 4) == (F / 4, F / 4)
    cfg = resolve(replace(OWN, **{"parallel.data": 2, "parallel.remat": "none"}), 2)
    sizes = bytes_of_names(cfg, own)
    assert sizes["qkv"] == sizes["attn_out"] == H * K * sizes["attn_norm"] / D
    assert sizes["mlp_hidden"] == F * sizes["attn_norm"] / D and sizes["attn_lse"] == 0
    assert [(kind.layer.name, kind.share) for kind in layer_kinds(cfg)] == [
        ("own", 0.5),
        ("attends", 0.5),
    ]
    own_size = sum(math.prod(w.shape) for w in own.weights(model).values())
    others = sum(math.prod(w.shape) for w in model.layers[1].weights(model).values())
    assert shard_of(cfg).stack.everything == 2 * own_size + 2 * others
    assert memory_of(cfg).total > 0


def test_a_users_components_read_the_norm_as_it_is():
    """Nothing that they do not know of is left to them."""
    cfg = resolve(replace(OWN, **{"parallel.data": 2}), 2)
    as_is = resolve(replace(composed(), **{"parallel.data": 2}), 2)
    assert on_gpus(as_is).norm == "deferred_scale" and on_gpus(cfg).norm == "written"
    assert not on_gpus(cfg).fused_gate_up


def test_a_plan_lists_layouts_of_a_users_components():
    plan = make_plan(OWN, CLUSTER, coarse=True)
    assert len(plan.fitting) > 10
    assert any(layout.cfg.parallel.tensor == 2 for layout in plan.fitting)
    assert all(layout.memory.total > 0 and layout.time.total > 0 for layout in plan.fitting)


def test_empty_slots_of_stages_have_memory():
    """Three layers of five on the first of two stages: both have memory for three."""
    pipeline = {"parallel.data": 1, "parallel.pipeline": 2, "parallel.num_microbatches": 2}
    layer = composed().model.layers[0]
    models = (
        replace(OWN, model=Model(d_model=D, vocab_size=VOCAB, layers=[layer] * n)) for n in (5, 6)
    )
    five, six = (state_bytes(resolve(replace(one, **pipeline), 2)) for one in models)
    assert five == six
