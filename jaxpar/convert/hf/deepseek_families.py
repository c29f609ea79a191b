"""Tables of DeepSeek's families, with multi-head latent attention, and of Kimi K2.

`families.py` has the others, and explains a table. `keys/latents.py` has the keys of attention.
"""

import dataclasses

from jaxpar.convert.hf.entries import (
    EXPERTS,
    LATENT_ATTENTION,
    MLP,
    MLP_NORM,
    SHARED_EXPERTS,
    TOP,
    of_dense_layers,
    of_modules,
)
from jaxpar.convert.hf.family import COMMON, Family

_SILU = {"hidden_act": "silu"}

#: Fields of DeepSeek-V3's relatives: some dense layers, then experts chosen by a sigmoid router.
OF_SIGMOID_ROUTERS = {
    "d_ff": "moe_intermediate_size",
    "dense_d_ff": "intermediate_size",
    "dense_layers": "first_k_dense_replace",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "experts_per_token": "num_experts_per_tok",
    "normalize_experts": "norm_topk_prob",
    "router_groups": "n_group",
    "router_groups_per_token": "topk_group",
    "router_scale": "routed_scaling_factor",
}
_OF_DEEPSEEK = {ours: key for ours, key in COMMON.items() if ours != "head_dim"}
_MOE_OF_DEEPSEEK = (*LATENT_ATTENTION, *MLP_NORM, *EXPERTS, *SHARED_EXPERTS)
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    entries=(*TOP, *_MOE_OF_DEEPSEEK, *of_dense_layers((*LATENT_ATTENTION, *MLP))),
    fields=_OF_DEEPSEEK
    | {
        ours: key
        for ours, key in OF_SIGMOID_ROUTERS.items()
        if ours not in ("normalize_experts", "router_groups", "router_groups_per_token")
    },
    same_as={"dense_d_ff": "d_ff"},
    fixed={"rope_layout": "interleaved", "latent_norm_eps": 1e-6, "normalize_experts": False},
    at_least={"kv_lora_rank": 1, "num_shared_experts": 1},
    defaults={
        "rms_norm_eps": 1e-6,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    required=_SILU
    | {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
    | {"moe_layer_freq": 1, "attention_bias": False, "mlp_bias": False},
    latent=True,
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    entries=(*DEEPSEEK_V2.entries, *of_modules(_MOE_OF_DEEPSEEK)),
    fields=_OF_DEEPSEEK | OF_SIGMOID_ROUTERS | {"mtp_depth": "num_nextn_predict_layers"},
    same_as={"dense_d_ff": "d_ff"},
    fixed={
        "rope_layout": "interleaved",
        "latent_norm_eps": 1e-6,
        "router_score": "sigmoid",
        "router_bias": True,
    },
    at_least={"kv_lora_rank": 1, "num_shared_experts": 1},
    defaults={
        "rms_norm_eps": 1e-6,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
    required=_SILU
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    | {"attention_bias": False, "rope_interleave": True},
    aliases={"num_local_experts": "n_routed_experts"},
    float8_blocks=True,
    latent=True,
    copies={
        "model.layers.{P}.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.{P}.shared_head.head.weight": "lm_head.weight",
    },
)
#: The same classes under a type of its own. Moonlight has that of DeepSeek-V3.
KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2")
