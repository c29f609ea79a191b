"""The published hybrid families: attention in some layers, a recurrence in the others."""

from jaxpar.convert.hf.entries import (
    ATTENTION,
    GATED_ATTENTION,
    MLP,
    MLP_NORM,
    QK_NORM,
    QWEN3_5_DELTA_NET,
    QWEN3_NEXT_DELTA_NET,
    QWEN3_NEXT_EXPERTS,
    TOP,
    of_delta_layers,
)
from jaxpar.convert.hf.family import COMMON, Family

SILU = {"hidden_act": "silu"}

_OF_DELTA_NET = {
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_value_head_dim": "linear_value_head_dim",
    "conv_kernel_size": "linear_conv_kernel_dim",
}
_DELTA_NET_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    entries=(
        *(*TOP, *GATED_ATTENTION, *QK_NORM, *MLP_NORM, *QWEN3_NEXT_EXPERTS),
        *of_delta_layers((ATTENTION[0], *QWEN3_NEXT_DELTA_NET, *MLP_NORM, *QWEN3_NEXT_EXPERTS)),
    ),
    fields=COMMON
    | _OF_DELTA_NET
    | {
        "d_ff": "moe_intermediate_size",
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "normalize_experts": "norm_topk_prob",
    },
    fixed={
        "qk_norm": True,
        "norm_offset": True,
        "attention_gate": True,
        "num_shared_experts": 1,
        "shared_expert_gate": True,
    },
    defaults=_DELTA_NET_DEFAULTS
    | {
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    required=SILU | {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    equal_keys={"shared_expert_intermediate_size": "moe_intermediate_size"},
    rope_fraction=0.25,
    hybrid=True,
    mtp_prefix="mtp.",
)
QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    entries=(
        *(*TOP, *GATED_ATTENTION, *QK_NORM, *MLP),
        *of_delta_layers((ATTENTION[0], *QWEN3_5_DELTA_NET, *MLP)),
    ),
    fields=COMMON | _OF_DELTA_NET,
    fixed={"qk_norm": True, "norm_offset": True, "attention_gate": True},
    defaults=_DELTA_NET_DEFAULTS | {"num_key_value_heads": 4},
    required=SILU | {"attention_bias": False},
    rope_fraction=0.25,
    hybrid=True,
    mtp_prefix="mtp.",
)
