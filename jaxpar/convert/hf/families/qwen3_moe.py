"""Qwen3 with experts."""

from jaxpar.components.attention import QkNorm
from jaxpar.components.experts import Experts
from jaxpar.convert.hf.families.shared import BIASES, EXPERTS, OF_LLAMA, TOP
from jaxpar.convert.hf.family import OF_ATTENTION, OF_MODEL, SILU, Family
from jaxpar.convert.hf.names import Names

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA, experts=EXPERTS),
    feed_forward=Experts,
    fields=OF_MODEL
    | OF_ATTENTION
    | BIASES
    | {
        "Experts.expert.d_ff": "moe_intermediate_size",
        "Experts.num_experts": "num_experts",
        "Experts.experts_per_token": "num_experts_per_tok",
        "Experts.router.normalize": "norm_topk_prob",
    },
    fixed={"Attention.qk_norm": QkNorm()},
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    required=SILU | {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    aliases={"num_local_experts": "num_experts"},
)
