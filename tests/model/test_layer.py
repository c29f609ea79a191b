"""A layer's branches: each weight belongs to one."""

import jax
import pytest

from jaxpar.config import Config, replace
from jaxpar.config.layout.composition import model_of
from jaxpar.execution.decisions import execution_of
from jaxpar.model import fused_weights, layer, parameters
from jaxpar.sharding.initial_values import initialize

KINDS = {
    "sinks": {"model.attention_sinks": True},
    "norms after": {"model.pre_norms": False, "model.post_norms": True},
    "dense": {},
    "biases": {"model.qkv_bias": True, "model.out_bias": True, "model.mlp_bias": True},
    "gemma": {"model.post_norms": True, "model.qk_norm": True, "model.activation": "gelu"},
    "olmoe": {"model.num_experts": 4, "model.qk_norm": True, "model.qk_norm_over": "all"},
    "gpt-oss": {
        "model.num_experts": 4,
        "model.expert_bias": True,
        "model.router_linear_bias": True,
    },
    "adapters": {"lora.rank": 2},
}
SMALL = {
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.d_ff": 64,
    "model.vocab_size": 64,
    "parallel.layer_loop": "unroll",
}


def weights_of_a_layer(cfg: Config) -> dict:
    """Their names and shapes."""
    specs, ex = parameters.param_specs(cfg.model, cfg.lora), execution_of(cfg)
    return jax.eval_shape(lambda: fused_weights.fuse(initialize(specs, 0), ex))["layers"][0][0]


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_every_weight_belongs_to_one_branch(fields):
    cfg = replace(Config(), **SMALL | fields)
    w = weights_of_a_layer(cfg)
    found = layer.branches_with_weights(w, model_of(cfg.model).layers[0], cfg.model)
    names = [name for _, *parts in found for own in parts for name in own]
    assert sorted(names) == sorted(w)


def test_a_weight_that_no_branch_names_is_an_error():
    cfg = replace(Config(), **SMALL)
    w = weights_of_a_layer(cfg)
    with pytest.raises(ValueError, match=r"no component of layer layers declares \['slopes'\]"):
        of = model_of(cfg.model).layers[0]
        layer.branches_with_weights(w | {"slopes": w["wo"]}, of, cfg.model)
