"""Plans of models with layers of several kinds, and their FLOPs."""

import dataclasses

import pytest

from jaxpar.components.costs import Projection
from jaxpar.components.recurrent import GatedDeltaNet, Recurrent
from jaxpar.config import Config, replace
from jaxpar.config.command_line import load_config
from jaxpar.config.validate import resolve
from jaxpar.kernels.platform import Platform
from jaxpar.model import flops
from jaxpar.prediction.kernels import with_backend
from jaxpar.prediction.layer_kinds import layer_kinds
from jaxpar.prediction.memory import memory_of, saved_per_token
from jaxpar.prediction.shard import shard_of
from tests.meshes.test_recurrent_layers import DELTA_NET, KIMI_LINEAR, NEMOTRON_H

ONE = {"parallel.data": 1}


def recurrent(cfg: Config) -> Recurrent:
    """The first recurrent mixer of a model."""
    mixers = (layer.mixer for layer in cfg.model.layers)
    return next(mixer for mixer in mixers if isinstance(mixer, Recurrent))


@pytest.mark.parametrize(
    "cfg", [DELTA_NET, NEMOTRON_H, KIMI_LINEAR], ids=["delta_net", "nemotron_h", "kimi"]
)
def test_a_stage_has_the_parameters_of_its_layers(cfg):
    deeper = replace(cfg, **{"model.layers": 2 * cfg.model.layers})
    of_layers = flops.num_params(deeper.model) - flops.num_params(cfg.model)
    whole = resolve(replace(cfg, **ONE), 1)
    assert shard_of(whole).stack.everything == of_layers
    staged = replace(deeper, **ONE, **{"parallel.pipeline": 2, "parallel.num_microbatches": 2})
    assert shard_of(resolve(staged, 2)).stack.everything == of_layers


def test_kinds_have_their_share_of_the_layers():
    shares = {kind.layer.name: kind.share for kind in layer_kinds(NEMOTRON_H)}
    assert shares == {"mamba_layers": 0.25, "mlp_layers": 0.5, "layers": 0.25}
    names = [layer.name for layer in NEMOTRON_H.model.layers]
    assert names == ["mamba_layers", "mlp_layers", "layers", "mlp_layers"]


def test_attention_alone_grows_with_the_sequence():
    m = load_config("qwen3_next_80b_a3b").model
    per_token = [flops.train_flops_per_token(m, length) for length in (4096, 8192)]
    assert per_token[1] - per_token[0] == 6 * 12 * 16 * 256 * 4096
    recurrences = 36 * 32 * 18 * 128 * 128
    assert per_token[0] - 6 * flops.num_matmul_params(m) == 6 * 12 * 16 * 256 * 4096 + recurrences


def test_layers_without_attention_save_none_of_its_values():
    """Per token: the layer's input, its norms' scales and what the policy names."""
    cfg = resolve(replace(NEMOTRON_H, **ONE, **{"parallel.remat": "attn_out"}), 1)
    mamba, _, attention, _ = (layer.mixer for layer in cfg.model.layers)
    of_attention = 4 * attention.num_heads * (attention.head_dim + 1)
    of_mamba = 4 * mamba.num_heads * mamba.head_dim
    assert saved_per_token(cfg) == 4 * cfg.model.d_model + 8 + (of_attention + of_mamba) / 4
    assert memory_of(cfg).total > 0


def test_decays_of_channels_need_more_memory_and_have_no_kernels():
    """XLA's plans on a CPU, of chunks of 64 and heads of 128: 13.4 and 17.6 KB a token and head."""
    cfg = load_config("kimi_linear_48b_a3b")
    by_channel = recurrent(cfg)
    sizes = {"key_head_dim": 128, "value_head_dim": 128}
    of_head = GatedDeltaNet(num_key_heads=32, num_value_heads=32, **sizes)
    needed = [m.backward_bytes(1, by_kernels=False) for m in (by_channel, of_head)]
    assert 1.25 < needed[0] / needed[1] < 1.4
    hopper = Platform("gpu", "NVIDIA H200", "9.0")
    first, *others = cfg.model.layers
    delta = dataclasses.replace(first, name="delta", mixer=of_head)
    mixed = replace(cfg, **{"model": cfg.model.with_layers([delta, *others])})
    assert with_backend(mixed, hopper).compute.recurrent_backend == "reference"
    assert with_backend(cfg, hopper).compute.recurrent_backend == "reference"


def test_latents_of_attention_are_not_those_of_other_layers():
    """Matrices of one layer of each kind in the plan are those of the model."""
    cfg = resolve(replace(KIMI_LINEAR, **ONE), 1)
    m, D = cfg.model, cfg.model.d_model
    layers = (kind.layer for kind in layer_kinds(cfg))
    matmuls = {one.name: one.mixer.matmuls(m, 1) for one in layers if one.mixer}
    mixer = recurrent(cfg)
    heads, latent = mixer.num_heads, mixer.value_head_dim
    columns = heads * (2 * mixer.key_head_dim + latent + 1) + 2 * latent
    assert matmuls["kda_layers"] == matmuls["kda_dense_layers"]
    assert matmuls["kda_layers"]["qkv"] == [
        Projection(D, columns),
        Projection(latent, heads * (mixer.key_head_dim + latent)),
    ]
    assert matmuls["kda_layers"].keys() == {"qkv", "wo"} and "latents" in matmuls["layers"]


def test_kernels_need_less_memory_and_time():
    """At Qwen3-Next's shape, XLA plans 0.3 GiB for the kernels, and 1.4 GiB without."""
    mixer = recurrent(load_config("qwen3_next_80b_a3b"))
    plain, kernels = (8192 * mixer.backward_bytes(1, by_kernels=by) for by in (False, True))
    assert 1.6e9 < plain < 2.1e9 and 0.3e9 < kernels < 0.6e9
