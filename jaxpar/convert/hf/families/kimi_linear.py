"""Kimi Linear: Kimi Delta Attention in most layers, and latent attention without positions."""

from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Glu
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.components.recurrent import KimiDeltaAttention
from jaxpar.convert.hf.families.shared import (
    AT_LEAST_ONE_SHARED,
    LATENT_ATTENTION,
    MIXTRAL_EXPERTS,
    MLP,
    NORMS,
    SIGMOID,
    TOP,
    WIDTHS,
    sigmoid_router,
)
from jaxpar.convert.hf.family import OF_MODEL, SILU, Family
from jaxpar.convert.hf.names import Name, Names, StoredAs

_LAYER = r"(?<=model\.layers\.)(\d+)\."
_KIMI_DELTA: dict[str, Name] = {
    **{f"kda_{n}": f"self_attn.{n}_proj.weight" for n in (*"qkvb", "f_a", "f_b", "g_a", "g_b")},
    **{f"kda_conv_{n}": f"self_attn.{n}_conv1d.weight" for n in "qkv"},
    "kda_a_log": StoredAs("self_attn.A_log", "1 1 a 1"),
    "kda_dt_bias": "self_attn.dt_bias",
    "kda_norm": "self_attn.o_norm.weight",
    "kda_out": "self_attn.o_proj.weight",
}
_EXPERTS: dict[str, Name] = MIXTRAL_EXPERTS | {
    **sigmoid_router("block_sparse_moe.gate"),
    **{
        f"w_shared_{n}": f"block_sparse_moe.shared_experts.{n}_proj.weight"
        for n in ("gate", "up", "down")
    },
}

KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    names=Names(top=TOP, weights=NORMS | LATENT_ATTENTION | MLP | _KIMI_DELTA, experts=_EXPERTS),
    mixer=LatentAttention,
    feed_forward=Experts,
    others=(KimiDeltaAttention, Glu),
    fields=OF_MODEL
    | {
        "LatentAttention.num_heads": "num_attention_heads",
        "Experts.expert.d_ff": "moe_intermediate_size",
        "Glu.d_ff": "intermediate_size",
        "Experts.num_experts": "num_experts",
        "Experts.num_shared_experts": "num_shared_experts",
        "Experts.experts_per_token": "num_experts_per_token",
        "Experts.router.normalize": "moe_renormalize",
        "Experts.router.groups": "num_expert_group",
        "Experts.router.groups_per_token": "topk_group",
        "Experts.router.scale": "routed_scaling_factor",
    },
    instead=WIDTHS,
    equal={"KimiDeltaAttention.norm_eps": "Norm.eps"},
    fixed=SIGMOID,
    at_least=AT_LEAST_ONE_SHARED,
    defaults={
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_shared_experts": 1,
        "num_experts_per_token": 8,
        "moe_renormalize": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    required=SILU
    | {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
    | {"attention_bias": False, "num_nextn_predict_layers": 0, "mla_use_output_gate": False},
    equal_keys={"num_key_value_heads": "num_attention_heads"},
    taken={
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    },
    renamed={
        _LAYER + r"mlp\.(gate|experts|shared_experts)\.": r"\1.block_sparse_moe.\2.",
        # transformers 5.24 saves a dense layer under the names of those with experts.
        _LAYER + r"block_sparse_moe\.(gate|up|down)_proj\.": r"\1.mlp.\2_proj.",
        r"\.self_attn\.forget_gate\.": ".self_attn.",
    },
    rope=False,
    kimi_linear=True,
)
