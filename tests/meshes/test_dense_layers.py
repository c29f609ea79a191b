"""First layers without experts: the same loss, gradients and steps on every mesh as the plain
model's."""

import dataclasses

import numpy as np
import pytest

from jaxpar.config import Config, Glu, Layer, replace
from jaxpar.config.validate import resolve
from jaxpar.inference.generation import (
    config_for_sampling,
    generate,
    make_next_logits,
    weights_for_sampling,
)
from jaxpar.inference.options import Sampling
from jaxpar.model import flops
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.mesh import make_mesh
from tests import weights
from tests.meshes.test_experts import BASE, DEEPSEEK, compare
from tests.slow import slow
from tests.tiny import ATTENTION

pytestmark = pytest.mark.usefixtures("quick_compile")

DENSE = Layer("dense_layers", ATTENTION, Glu(20))


def after(dense: list[Layer], cfg: Config) -> Config:
    """The config with dense layers before its own."""
    layers = [*dense, *cfg.model.layers]
    return replace(cfg, **{"model.layers": layers, "parallel.layer_loop": "unroll"})


AFTER_ONE = after([DENSE], BASE)

MESHES = """
data=2,tensor=2,layer_loop=unroll
data=1,layer_loop=unroll
data=2,zero=1,num_microbatches=2,layer_loop=unroll
data=2,zero=2,num_microbatches=2,layer_loop=unroll
expert=2,sequence=2,layer_loop=unroll
expert=2,data=2,zero=1,num_microbatches=2,layer_loop=unroll
expert=2,data=2,zero=2,num_microbatches=2,layer_loop=unroll
replica=2,tensor=2,layer_loop=unroll,remat=full
data=2,tensor=2,layer_loop=unroll,row_groups=2
tensor=2,num_microbatches=4,zero=1,layer_loop=unroll
pipeline=2,num_microbatches=2,zero=1,layer_loop=unroll
pipeline=2,num_microbatches=4,data=2,layer_loop=unroll
pipeline=2,num_microbatches=2,tensor=2,layer_loop=scan
pipeline=2,num_microbatches=2,expert=2,tensor=2,zero=1,layer_loop=unroll
pipeline=2,num_microbatches=2,expert=2,sequence=2,zero=2,layer_loop=unroll
pipeline=2,num_microbatches=4,schedule=gpipe,pipeline_save=inputs,layer_loop=unroll
pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll
""".split()

#: Two dense layers, then four others. With larger weights, rounding grows with depth on every mesh.
STAGES = after([DENSE] * 2, replace(DEEPSEEK, **{"model.num_layers": 4, "model.init_std": 0.1}))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_gradients(mesh, devices):
    assert not compare(mesh, after([DENSE], DEEPSEEK), devices).mismatches()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    """
pipeline=2,virtual_stages=2,num_microbatches=2,zero=1,layer_loop=unroll
pipeline=2,virtual_stages=2,num_microbatches=2,sequence=2,layer_loop=scan
pipeline=2,virtual_stages=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll
pipeline=3,num_microbatches=4,data=2,zero=1,layers_per_stage=2,1,1,layer_loop=unroll
""".split(),
)
def test_gradients_before_several_stages(mesh, devices):
    assert not compare(mesh, STAGES, devices).mismatches()


WINDOW = dataclasses.replace(ATTENTION, window=5)
WIDE = BASE.model.layers[0]
LOCAL = dataclasses.replace(WIDE, name="local_layers", mixer=WINDOW)


@pytest.mark.parametrize(
    "layers",
    [
        slow([Layer("dense_layers", ATTENTION, Glu(12))] * 2 + [WIDE]),
        slow([dataclasses.replace(DENSE, mixer=WINDOW), WIDE, LOCAL, WIDE]),
    ],
)
def test_gradients_of_other_layers(layers, devices):
    cfg = replace(AFTER_ONE, **{"model.layers": layers})
    assert not compare("data=2,tensor=2,layer_loop=unroll", cfg, devices).mismatches()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    ["data=2,tensor=2,layer_loop=unroll", "pipeline=2,num_microbatches=2,data=2,layer_loop=unroll"],
)
def test_steps_with_a_bias(mesh, devices):
    found = compare(mesh, after([DENSE], DEEPSEEK), devices, 5)
    assert found.update is not None and not found.mismatches()


@pytest.mark.slow  # quicker: inference/test_generation.py
def test_generation_takes_the_tokens_of_the_whole_sequence(devices):
    """By a cache, and by the complete text at once."""
    cfg = resolve(config_for_sampling(replace(AFTER_ONE, **{"parallel.data": 1})), 1)
    mesh = make_mesh(cfg.parallel, devices[:1])
    params = weights.init_params(param_specs(cfg.model), cfg, mesh)
    prompt, size = [3, 1, 4, 1, 5], {"max_tokens": 4, "vocab_size": cfg.model.vocab_size}
    fused, greedy = weights_for_sampling(params, cfg, mesh), Sampling(temperature=0.0)
    rows = generate(fused, cfg, mesh, [prompt], greedy, stop=(), **size)
    found = [token for (new,) in rows for token in new]
    assert len(found) == 4
    step, text = make_next_logits(cfg, mesh), np.zeros((1, 16), np.int32)
    text[0, :5] = prompt
    for at, token in enumerate(found, 4):
        assert np.argmax(step(params, text, at)[0]) == token
        text[0, at + 1] = token


def test_only_layers_with_experts_leave_experts_out_of_the_flops():
    m, of = AFTER_ONE.model, WIDE.feed_forward
    fewer = replace(AFTER_ONE, **{"model.num_layers": 2}).model
    of_layers = flops.num_matmul_params(m) - flops.num_matmul_params(fewer)
    one = flops.num_params(m) - flops.num_params(fewer)
    unused = (of.num_experts - of.experts_per_token) * 3 * m.d_model * of.expert.d_ff
    assert of_layers == one - unused
