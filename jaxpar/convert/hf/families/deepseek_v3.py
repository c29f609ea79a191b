"""DeepSeek-V3, and Moonlight."""

from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Glu
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.convert.hf.families.shared import (
    AT_LEAST_ONE_SHARED,
    COPIES,
    EXPERTS,
    LATENT_ATTENTION,
    MLP,
    MODULES,
    MTP_TAKEN,
    NORMS,
    OF_SIGMOID_ROUTERS,
    SIGMOID,
    TOP,
    WIDTHS,
)
from jaxpar.convert.hf.family import OF_MODEL, SILU, Family
from jaxpar.convert.hf.names import Names

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    names=Names(top=TOP, weights=NORMS | LATENT_ATTENTION | MLP, experts=EXPERTS, modules=MODULES),
    mixer=LatentAttention,
    feed_forward=Experts,
    others=(Glu,),
    fields=OF_MODEL
    | OF_SIGMOID_ROUTERS
    | {"LatentAttention.num_heads": "num_attention_heads", "mtp_depth": "num_nextn_predict_layers"},
    instead=WIDTHS,
    fixed=SIGMOID,
    at_least=AT_LEAST_ONE_SHARED,
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
    required=SILU
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    | {"attention_bias": False, "rope_interleave": True},
    aliases={"num_local_experts": "n_routed_experts"},
    equal_keys={"num_key_value_heads": "num_attention_heads"},
    taken=MTP_TAKEN,
    dense_first="first_k_dense_replace",
    rope_layout="interleaved",
    float8_blocks=True,
    latent=True,
    copies=COPIES,
)
