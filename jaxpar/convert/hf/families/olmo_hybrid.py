"""OLMo Hybrid: layers of OLMo 3, and of Gated DeltaNet with norms of inputs."""

from jaxpar.components.attention import QkNorm
from jaxpar.components.recurrent import GatedDeltaNet
from jaxpar.convert.hf.families.shared import (
    ATTENTION,
    BIASES,
    MLP,
    NORMS,
    NORMS_AFTER,
    OF_DELTA_NET,
    TOP,
)
from jaxpar.convert.hf.family import COMMON, SILU, Family
from jaxpar.convert.hf.names import Name, Names

#: A tensor for each.
_DELTA_NET: dict[str, Name] = {
    **{f"delta_{n}": f"linear_attn.{n}_proj.weight" for n in "qkvba"},
    "delta_z": "linear_attn.g_proj.weight",
    **{f"delta_conv_{n}": f"linear_attn.{n}_conv1d.weight" for n in "qkv"},
    "delta_a_log": "linear_attn.A_log",
    "delta_dt_bias": "linear_attn.dt_bias",
    "delta_norm": "linear_attn.o_norm.weight",
    "delta_out": "linear_attn.o_proj.weight",
}

OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    names=Names(top=TOP, weights=NORMS | NORMS_AFTER | ATTENTION | MLP | _DELTA_NET),
    others=(GatedDeltaNet,),
    fields=COMMON
    | BIASES
    | OF_DELTA_NET
    | {"GatedDeltaNet.allow_neg_eigval": "linear_allow_neg_eigval"},
    fixed={
        "Attention.qk_norm": QkNorm(over="all"),
        "Layer.norms": {"Attention": "after"},
        "GatedDeltaNet.norm_eps": 1e-5,
    },
    defaults={
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "full_attention_interval": 4,
    },
    required=SILU,
    renamed={
        r"\.attention_layer_norm\.": ".input_layernorm.",
        r"\.feedforward_layer_norm\.": ".post_attention_layernorm.",
    },
    null_rope=True,
    hybrid=True,
    heads_fill_model=True,
)
