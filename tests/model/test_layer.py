"""A layer's branches: each weight belongs to one."""

import jax
import pytest

from jaxpar.config import Config, QkNorm, replace
from jaxpar.execution.decisions import execution_of
from jaxpar.model import fused_weights, layer, parameters
from jaxpar.sharding.initial_values import initialize
from tests import tiny

KINDS = {
    "sinks": {"model.layers.mixer.sinks": True},
    "norms after": {"model.layers.norms": "after"},
    "dense": {},
    "biases": {
        "model.layers.mixer.bias": True,
        "model.layers.mixer.out_bias": True,
        "model.layers.feed_forward.bias": True,
    },
    "gemma": {
        "model.layers.norms": "around",
        "model.layers.mixer.qk_norm": QkNorm(),
        "model.layers.feed_forward.activation": "gelu",
    },
    "olmoe": {
        "model.layers.mixer.qk_norm": QkNorm(over="all"),
        "model.layers.feed_forward": tiny.EXPERTS,
    },
    "gpt-oss": {
        "model.layers.feed_forward": tiny.EXPERTS,
        "model.*.feed_forward.expert.bias": True,
        "model.*.feed_forward.router.linear_bias": True,
    },
    "adapters": {"lora.rank": 2},
}
SMALL = {"model": tiny.SMALL.model, "model.num_layers": 2, "parallel.layer_loop": "unroll"}


def weights_of_a_layer(cfg: Config) -> dict:
    """Their names and shapes."""
    specs, ex = parameters.param_specs(cfg.model, cfg.lora), execution_of(cfg)
    return jax.eval_shape(lambda: fused_weights.fuse(initialize(specs, 0), ex))["layers"][0][0]


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_every_weight_belongs_to_one_branch(fields):
    cfg = replace(Config(), **SMALL | fields)
    w = weights_of_a_layer(cfg)
    found = layer.branches_with_weights(w, cfg.model.layers[0], cfg.model)
    names = [name for _, *parts in found for own in parts for name in own]
    assert sorted(names) == sorted(w)


def test_a_weight_that_no_branch_names_is_an_error():
    cfg = replace(Config(), **SMALL)
    w = weights_of_a_layer(cfg)
    with pytest.raises(ValueError, match=r"no component of layer layers declares \['slopes'\]"):
        of = cfg.model.layers[0]
        layer.branches_with_weights(w | {"slopes": w["wo"]}, of, cfg.model)
