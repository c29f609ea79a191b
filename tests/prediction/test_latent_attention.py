"""What the planner knows of latent attention and of multi-token prediction."""

import dataclasses

import pytest

from jaxpar.components.experts import experts_in
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.components.model import Model
from jaxpar.config import command_line, replace
from jaxpar.config.validate import resolve
from jaxpar.model import flops
from jaxpar.prediction.compute import head_seconds, layer_seconds
from jaxpar.prediction.hardware import GPUS
from jaxpar.prediction.memory import bytes_of_names, memory_of
from jaxpar.prediction.shard import shard_of

NAMES = ("deepseek_v2_lite", "deepseek_v3")


def attention_of(m: Model) -> tuple[LatentAttention, Model]:
    """The mixer of a model's layers, and the model."""
    model = m
    (mixer,) = {layer.mixer for layer in model.layers}
    return mixer, model


def config(name: str, **fields):
    """A shipped config on one device, with short rows."""
    cfg = command_line.load_config(name)
    small = {"train.global_batch_size": 8, "data.seq_len": 4096, "parallel.remat": "dots"}
    return resolve(replace(cfg, **small, **fields), 8)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_in_a_layer_or_a_table(name):
    cfg = config(name, **{"model.mtp_depth": 1})
    m, shard = cfg.model, shard_of(cfg)
    mixer, of_experts = attention_of(m)[0], experts_in(m)
    assert shard.stack.everything + 2 * shard.table + m.d_model == flops.num_params(m)
    gains = shard.stack.everything - shard.stack.matrices
    latents = mixer.kv_lora_rank + (mixer.q_lora_rank or 0)
    norms = (2 * m.d_model + latents) * (m.num_layers + 1) + 3 * m.d_model
    bias = of_experts[0].num_experts * of_experts[0].router.balancing_bias
    biases = bias * (len(of_experts) + 1)  # the module's too
    assert gains == norms + biases


@pytest.mark.parametrize("name", NAMES)
def test_attention_has_the_flops_of_its_parameters(name):
    m = config(name).model
    mixer, model = attention_of(m)
    sites = [site for of in mixer.matmuls(model, 1).values() for site in of]
    counted = sum(site.times * site.inner * site.out for site in sites)
    D, H, K, C, R, I = m.d_model, mixer.num_heads, 192, mixer.kv_lora_rank, 64, mixer.v_head_dim  # noqa: E741
    query = D * 1536 + 1536 * H * K if mixer.q_lora_rank else D * H * K
    assert counted == query + D * (C + R) + C * H * (K - R + I) + H * I * D
    assert mixer.pair_flops() == 2 * H * (192 + 128)
    every = flops.train_flops_per_token(m, 4096) - flops.train_flops_per_token(m, 2048)
    assert every == 3 * m.num_layers * mixer.pair_flops() * 2048 / 2
    # A forward has 2 of 7 parts, of keys 1 of 4, of values 1 of 3.
    assert flops.attention_kernel_flops(m, 2) == m.num_layers * H * (8 * 192 + 6 * 128)


def test_tensor_ranks_split_heads_and_tokens_but_not_latents():
    cfg = config("deepseek_v3", **{"parallel.tensor": 4})
    mixer, model = attention_of(cfg.model)
    one, four = mixer.widths(model, 1), mixer.widths(model, 4)
    assert four.query == one.query / 4 == 128 * 192 / 4 and four.out == one.out / 4
    assert one.latents == four.latents == mixer.received(model) == 1536 + 512 + 64
    names = bytes_of_names(cfg, model.layers[0])
    assert names["latents"] * 4 == names["latent_norms"] == 2 * 2112
    assert names["qkv"] == 2 * (32 * (192 + 128 + 128) + 64) and names["attn_out"] == 2 * 32 * 128
    mixer, model = attention_of(config("deepseek_v2_lite").model)
    assert mixer.received(model) == 2048 + 512 + 64


def test_a_module_costs_a_layer_and_a_head():
    gpu = next(iter(GPUS.values()))
    plain = config("deepseek_v2_lite")
    cfg = dataclasses.replace(plain, model=dataclasses.replace(plain.model, mtp_depth=1))
    before, after = shard_of(plain), shard_of(cfg)
    assert after.layers == before.layers + 1
    assert layer_seconds(cfg, after, gpu) == layer_seconds(plain, before, gpu)
    twice = head_seconds(plain, before, gpu).times(2)
    assert head_seconds(cfg, after, gpu).total == pytest.approx(twice.total)
    assert memory_of(cfg).total > memory_of(plain).total
    m, more = plain.model, cfg.model
    added = flops.num_matmul_params(more) - flops.num_matmul_params(m)
    one = experts_in(m)[0]
    unused = (one.num_experts - one.experts_per_token) * 3 * m.d_model * one.expert.d_ff
    own = flops.num_params(more) - flops.num_params(m)
    assert added == own - unused + m.vocab_size * m.d_model
