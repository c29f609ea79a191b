"""OLMoE."""

from jaxpar.components.attention import QkNorm
from jaxpar.components.experts import Experts
from jaxpar.convert.hf.families.shared import BIASES, EXPERTS, OF_LLAMA, TOP
from jaxpar.convert.hf.family import OF_ATTENTION, OF_MODEL, SILU, Family
from jaxpar.convert.hf.names import Names

OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA, experts=EXPERTS),
    feed_forward=Experts,
    fields=OF_MODEL
    | OF_ATTENTION
    | BIASES
    | {
        "Experts.expert.d_ff": "intermediate_size",
        "Experts.num_experts": "num_experts",
        "Experts.experts_per_token": "num_experts_per_tok",
        "Experts.router.normalize": "norm_topk_prob",
    },
    fixed={"Attention.qk_norm": QkNorm(over="all")},
    defaults={
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    required=SILU | {"clip_qkv": None},
    heads_fill_model=True,
    width_is_fixed=True,
)
