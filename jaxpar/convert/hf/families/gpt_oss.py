"""gpt-oss: sinks, a window in every second layer, experts with biases."""

from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import ClampedSwiglu
from jaxpar.convert.hf.families.shared import BIASES, OF_LLAMA, TOP
from jaxpar.convert.hf.family import OF_ATTENTION, OF_MODEL, SILU, Family
from jaxpar.convert.hf.names import Name, Names, StoredAs, together

_EXPERT = "mlp.experts."
#: Gate and up alternate in the last dimension of a tensor.
_EXPERTS: dict[str, Name] = {
    "router": "mlp.router.weight",
    "b_router": "mlp.router.bias",
    **together(_EXPERT + "gate_up_proj", "a b c2", "w_gate", "w_up"),
    **together(_EXPERT + "gate_up_proj_bias", "a b2", "b_gate", "b_up"),
    "w_down": StoredAs(_EXPERT + "down_proj", "a b c"),
    "b_down": StoredAs(_EXPERT + "down_proj_bias", "a b"),
}

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA | {"sinks": "self_attn.sinks"}, experts=_EXPERTS),
    feed_forward=Experts,
    fields=OF_MODEL
    | OF_ATTENTION
    | BIASES
    | {
        "Experts.expert.d_ff": "intermediate_size",
        "Experts.num_experts": "num_local_experts",
        "Experts.experts_per_token": "num_experts_per_tok",
        "Experts.expert.activation.limit": "swiglu_limit",
        "Experts.expert.activation.alpha": "swiglu_alpha",
    },
    fixed={
        "Attention.sinks": True,
        "Experts.router.linear_bias": True,
        "Experts.router.normalize": True,
        "Experts.expert.bias": True,
        "Experts.expert.activation": ClampedSwiglu,
    },
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    required=SILU,
    aliases={"num_experts": "num_local_experts"},
    sliding=True,
    two_kinds=True,
    mxfp4=True,
)
