"""Counts of models whose global layers have heads of their own."""

import pytest

from jaxpar.certification.distances import zero_gradients
from jaxpar.config import replace
from jaxpar.config.command_line import load_config
from jaxpar.config.validate import resolve
from jaxpar.model import decode, flops
from jaxpar.model.attention_context import attention_layers, heads_of
from jaxpar.model.parameters import param_specs
from jaxpar.prediction.hardware import H200
from jaxpar.prediction.kernels import attention_runs_on_reference
from jaxpar.prediction.layer_kinds import layer_kinds
from jaxpar.prediction.shard import shard_of
from jaxpar.sharding.params import flat
from jaxpar.training.selftests.attention import choose_kernels
from tests.meshes.test_global_layers import GEMMA4

CONFIG = load_config("gemma_4/31b")
M = CONFIG.model


def test_parameters_of_each_kind():
    specs = {name: spec.shape for name, spec in flat(param_specs(M)).items()}
    assert specs["layers/wk"] == specs["layers/wv"] == (50, 5376, 16, 256)
    assert specs["global_layers/wk"] == (10, 5376, 4, 512)
    assert "global_layers/wv" not in specs
    assert specs["global_layers/wo"] == (10, 32, 512, 5376)
    assert specs["global_layers/k_norm"] == (10, 512)
    assert specs["layers/layer_scale"] == (50,)


def test_a_stage_has_the_parameters_of_its_layers():
    one, deeper = GEMMA4, replace(GEMMA4, **{"model.num_layers": 4})
    of_layers = flops.num_params(deeper.model) - flops.num_params(one.model)
    whole = resolve(replace(one, **{"parallel.data": 1}), 1)
    assert shard_of(whole).stack.everything == of_layers


def test_flops_of_each_kind():
    per_token = [flops.train_flops_per_token(M, length) for length in (4096, 8192)]
    assert per_token[1] - per_token[0] == 6 * 32 * (50 * 256 + 10 * 512) * 4096


def test_a_cache_has_the_heads_of_each_layer():
    slots = 100
    local, of_global = (2 * slots * G * K * 2 for G, K in ((16, 256), (4, 512)))
    assert decode.cache_bytes(CONFIG, 1, slots) == 50 * local + 10 * of_global
    assert decode.cache_bytes(CONFIG, 1, slots, tensor=4) == (50 * local + 10 * of_global) / 4


def test_the_planner_knows_both_shapes():
    cfg = resolve(replace(load_config("gemma_4/31b"), **{"parallel.data": 8}), 8)
    shares = {kind.layer.name: kind.share for kind in layer_kinds(cfg)}
    assert shares == {"layers": 5 / 6, "global_layers": 1 / 6}
    model = cfg.model
    local, of_global = (kind.layer.mixer for kind in layer_kinds(cfg))
    assert local.widths(model, 1).key == 16 * 256
    assert of_global.widths(model, 1).key == 4 * 512
    # Queries and keys alone: values are the keys.
    assert of_global.matmuls(model, 1)["qkv"][0].out == (32 + 4) * 512
    assert local.matmuls(model, 1)["qkv"][0].out == (32 + 16 + 16) * 256
    assert attention_runs_on_reference(cfg, H200)  # heads of 512
    narrow = replace(cfg, **{"model.global_layers.mixer.head_dim": 256})
    assert not attention_runs_on_reference(narrow, H200)


def test_kernels_are_chosen_for_each_shape():
    cfg = resolve(replace(GEMMA4, **{"parallel.data": 1}), 1)
    assert [heads_of(layer).key_dim for layer in attention_layers(cfg.model)] == [4, 16]
    assert len(choose_kernels(cfg, 1)) == 2


@pytest.mark.parametrize(
    ("fields", "zero"),
    [
        ({}, {"global_layers/layer_scale"}),
        ({"model.num_layers": 4}, {"global_layers/layer_scale[-1]"}),
        ({"model.*.scaled": False}, set()),
    ],
)
def test_the_last_number_has_no_gradient(fields, zero):
    """Others of its stack have."""
    assert zero_gradients(replace(GEMMA4, **fields).model) == zero
