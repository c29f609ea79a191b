"""Llama 4 (text): chunks, layers without RoPE whose queries grow, and a shared expert."""

from jaxpar.components.attention import QkNorm
from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Glu
from jaxpar.convert.hf.families.shared import ATTENTION, BIASES, NORMS, TOP, WIDTHS
from jaxpar.convert.hf.family import OF_ATTENTION, OF_MODEL, SILU, Family
from jaxpar.convert.hf.names import Name, Names, StoredAs, together

_PARTS = ("gate", "up", "down")
_MLP: dict[str, Name] = {f"w_{n}": f"feed_forward.{n}_proj.weight" for n in _PARTS}
#: Gate, then up, in the last dimension of a tensor.
_EXPERTS: dict[str, Name] = {
    "router": "feed_forward.router.weight",
    **together("feed_forward.experts.gate_up_proj", "a b +", "w_gate", "w_up"),
    "w_down": StoredAs("feed_forward.experts.down_proj", "a b c"),
    **{f"w_shared_{n}": f"feed_forward.shared_expert.{n}_proj.weight" for n in _PARTS},
}

LLAMA4 = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    names=Names(top=TOP, weights=NORMS | ATTENTION | _MLP, experts=_EXPERTS),
    feed_forward=Experts,
    others=(Glu,),
    fields=OF_MODEL
    | OF_ATTENTION
    | BIASES
    | {
        "Experts.expert.d_ff": "intermediate_size",
        "Glu.d_ff": "intermediate_size_mlp",
        "Attention.qk_norm": "use_qk_norm",
        "Experts.num_experts": "num_local_experts",
        "Experts.experts_per_token": "num_experts_per_tok",
    },
    switches={"Attention.qk_norm": (QkNorm(gain=False), None)},
    instead=WIDTHS,
    fixed={
        "Experts.router.score": "sigmoid",
        "Experts.router.scales_input": True,
        "Experts.router.normalize": False,
        "Experts.num_shared_experts": 1,
    },
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "attention_bias": False,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "use_qk_norm": True,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 16384,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    required=SILU,
    rope_layout="interleaved",
    nope=True,
    chunked=True,
)
