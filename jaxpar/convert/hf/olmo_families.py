"""The published families of OLMo since OLMo 2: norms of outputs, and one of queries and keys."""

import dataclasses

from jaxpar.convert.hf.entries import (
    ATTENTION,
    MLP,
    OLMO2_NORMS,
    OLMO_HYBRID_DELTA_NET,
    OUT_BIAS,
    QK_NORM_OVER_ALL,
    QKV_BIAS,
    TOP,
    of_delta_layers,
)
from jaxpar.convert.hf.family import COMMON, Family
from jaxpar.convert.hf.hybrid_families import OF_DELTA_NET, SILU

_OF_OLMO2 = (*TOP, *ATTENTION[1:], *QKV_BIAS, *OUT_BIAS, *QK_NORM_OVER_ALL, *OLMO2_NORMS, *MLP[1:])
OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    entries=_OF_OLMO2,
    fields=COMMON | {"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
    fixed={"qk_norm": True, "qk_norm_over": "all", "pre_norms": False, "post_norms": True},
    defaults={"rms_norm_eps": 1e-5, "attention_bias": False},
    required=SILU,
    heads_fill_model=True,
)
OLMO3 = dataclasses.replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "rope_theta": 500_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    sliding=True,
    two_kinds=True,
    two_ropes="rope_theta",
)

#: The layers with attention are OLMo 3's, and those of Gated DeltaNet have norms of inputs.
OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    entries=(
        *_OF_OLMO2,
        *of_delta_layers((ATTENTION[0], *OLMO_HYBRID_DELTA_NET, *MLP)),
    ),
    fields=COMMON
    | OF_DELTA_NET
    | {
        "linear_allow_neg_eigval": "linear_allow_neg_eigval",
        "qkv_bias": "attention_bias",
        "out_bias": "attention_bias",
    },
    fixed={
        "qk_norm": True,
        "qk_norm_over": "all",
        "pre_norms": False,
        "post_norms": True,
        "recurrent_norms": "before",
        "linear_norm_eps": 1e-5,
    },
    defaults={
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "full_attention_interval": 4,
    },
    required=SILU,
    null_rope=True,
    hybrid=True,
    heads_fill_model=True,
)
