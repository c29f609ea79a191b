"""Multi-head latent attention: the plain model's loss and gradients on every mesh."""

import functools
import math

import numpy as np
import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import (
    Config,
    Experts,
    GatedDeltaNet,
    Glu,
    LatentAttention,
    Layer,
    Rope,
    RopeScaling,
    Router,
    replace,
)
from jaxpar.config.validate import resolve
from jaxpar.inference.generation import (
    config_for_sampling,
    generate,
    make_next_logits,
    weights_for_sampling,
)
from jaxpar.inference.options import Sampling
from jaxpar.model.decode import cache_bytes
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from tests import weights
from tests.slow import slow
from tests.tiny import GLU, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

#: As in DeepSeek-V3: queries have a latent, and values are narrower than keys.
YARN = RopeScaling(kind="yarn", original_max_position=16, mscale_all_dim=1, attention_factor=1)
LATENT = LatentAttention(
    num_heads=4,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=6,
    kv_lora_rank=8,
    q_lora_rank=12,
    rope=Rope(layout="interleaved", scaling=YARN),
)
V3 = {"model.layers.mixer": LATENT}
BASE = replace(TINY, **V3)

#: As in DeepSeek-V2-Lite.
NO_QUERY_LATENT = {"model.*.mixer.q_lora_rank": None}

ROUTED = Experts(
    expert=GLU,
    num_experts=8,
    experts_per_token=2,
    router=Router(score="sigmoid", balancing_bias=True, groups=4, groups_per_token=2, scale=2.5),
    num_shared_experts=1,
)
EXPERTS = {"model.layers.feed_forward": ROUTED}
#: The first layer has no experts.
DENSE = {
    "model.layers": [
        Layer("dense_layers", LATENT, Glu(20)),
        *[Layer("layers", LATENT, ROUTED)] * 2,
    ]
}
#: As in Kimi Linear: most layers are recurrent.
DELTA = GatedDeltaNet(num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=4, chunk=8)
HYBRID = {
    "model.layers": [Layer("delta_layers", DELTA, GLU), Layer("layers", LATENT, GLU)],
}
WINDOW = {"model.layers.mixer.window": 5}
LORA = {
    "lora.rank": 2,
    "lora.targets": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
}

CASES = [
    ("data=2,sequence=2,tensor=2,context=ring", {}),
    slow("pipeline=2,num_microbatches=2,tensor=2,zero=1,layer_loop=unroll", NO_QUERY_LATENT),
    slow("data=1", {}),
    slow("data=1,layer_loop=unroll", NO_QUERY_LATENT),
    slow("data=2,tensor=2,layer_loop=unroll", {"parallel.remat": "none"}),
    slow("data=2,sequence=2,tensor=2", NO_QUERY_LATENT),
    slow("sequence=4,context=ulysses,zero=1", {"parallel.remat": "full"}),
    slow("sequence=2,tensor=2,context=ring,zero=2,num_microbatches=2", {}),
    slow("data=2,tensor=2,row_groups=2,layer_loop=unroll", {}),
    slow("tensor=2,row_groups=2,num_microbatches=2,zero=1,layer_loop=unroll", NO_QUERY_LATENT),
    slow("tensor=2,num_microbatches=4,zero=1,layer_loop=unroll", {}),
    slow(
        "pipeline=2,num_microbatches=4,zero=1,tensor=2,schedule=zero_bubble,layer_loop=unroll", {}
    ),
    slow("pipeline=2,num_microbatches=2,data=2,layer_loop=unroll", {"data.document_mask": False}),
    slow("data=2,expert=2,tensor=2", EXPERTS),
    slow("expert=2,sequence=2,tensor=2,layer_loop=unroll", DENSE),
    slow("pipeline=2,num_microbatches=2,expert=2,zero=1,layer_loop=unroll", EXPERTS),
    slow("data=2,tensor=2", LORA),
    slow(
        "data=2,tensor=2,layer_loop=unroll",
        LORA | NO_QUERY_LATENT | {"lora.targets": ("q_proj", "kv_b_proj")},
    ),
    slow("data=2,tensor=2,layer_loop=unroll", HYBRID),
    slow("data=2,tensor=2", WINDOW | {"model.layers.norms": "around"}),
]


@functools.cache
def reference_of(cfg: Config) -> tuple:
    batch = traces.random_batch(cfg, 0)
    return batch, weights.plain_gradients(cfg, batch)


@pytest.mark.parametrize(("mesh", "values"), CASES)
def test_gradients(mesh, values, devices):
    cfg = replace(BASE, **values)
    parallel = parse_meshes([mesh], cfg.parallel)[mesh]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batch, wanted = reference_of(cfg)
    found = weights.first_gradients(on_mesh, make_mesh(parallel, devices[:n]), batch)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()


@pytest.mark.slow  # quicker: inference/test_generation.py
@pytest.mark.parametrize(
    ("tensor", "values"),
    [(2, NO_QUERY_LATENT), (1, {}), (2, DENSE), (1, WINDOW)],
)
def test_generation_with_a_cache_of_latents(tensor, values, devices):
    """The absorbed form writes the tokens that the complete text gives."""
    one = replace(BASE, **{"parallel.layer_loop": "unroll", "model.init_std": 1.0} | values)
    cfg = resolve(config_for_sampling(one, tensor), tensor)
    mesh = make_mesh(cfg.parallel, devices[:tensor])
    params = weights.init_params(param_specs(cfg.model), cfg, mesh)
    prompt, size = [3, 1, 4, 1, 5, 9], {"max_tokens": 6, "vocab_size": cfg.model.vocab_size}
    fused, greedy = weights_for_sampling(params, cfg, mesh), Sampling(temperature=0.0)
    rows = generate(fused, cfg, mesh, [prompt], greedy, stop=(), **size)
    found = [token for (new,) in rows for token in new]
    assert len(found) == 6 and len(set(found)) > 1
    step, text = make_next_logits(cfg, mesh), np.zeros((1, 16), np.int32)
    text[0, : len(prompt)] = prompt
    for at, token in enumerate(found, len(prompt) - 1):
        assert np.argmax(step(params, text, at)[0]) == token
        text[0, at + 1] = token


def test_the_cache_has_latents_for_all_heads_together():
    wanted = 4 * len(BASE.model.layers) * 15 * 12
    assert cache_bytes(BASE, 3, 5) == cache_bytes(BASE, 3, 5, tensor=2) == wanted


FLOAT8 = {
    "model.d_model": 32,
    "model.layers.mixer.qk_nope_head_dim": 16,
    "model.layers.mixer.qk_rope_head_dim": 16,
    "model.layers.mixer.v_head_dim": 16,
    "model.layers.mixer.kv_lora_rank": 32,
    "model.layers.mixer.q_lora_rank": 16,
    "model.layers.feed_forward": Glu(32),
    "model.vocab_size": 64,
    "compute.dtype": "bfloat16",
    "data.seq_len": 64,
    "parallel.layer_loop": "unroll",
}


@pytest.mark.slow
@pytest.mark.parametrize("values", [{"model.mtp_depth": 1}, NO_QUERY_LATENT])
@pytest.mark.parametrize("mesh", [{"parallel.data": 2}, {"parallel.data": 2, "parallel.tensor": 2}])
def test_float8(mesh, values, devices):
    """With the norm in the quantizer, and with gathered latents: close to the compute dtype."""
    found = []
    for dtype in ("compute", "float8"):
        cfg = replace(BASE, **FLOAT8 | values | mesh, **{"compute.matmul_dtype": dtype})
        n = cfg.parallel.data * cfg.parallel.tensor
        on_mesh = resolve(cfg, n)
        batch = traces.random_batch(on_mesh, 0)
        mesh_of_n = make_mesh(on_mesh.parallel, devices[:n])
        found.append(weights.first_gradients(on_mesh, mesh_of_n, batch))
    plain, rounded = found
    assert 0 < abs(plain.loss - rounded.loss) < 0.01
    for name in plain.gradients:
        if name.startswith("layers/w"):
            a, b = plain.gradients[name].ravel(), rounded.gradients[name].ravel()
            # Three bits of mantissa in every operand; an error of a matmul would leave no angle.
            assert a @ b > 0.9 * np.linalg.norm(a) * np.linalg.norm(b), name
