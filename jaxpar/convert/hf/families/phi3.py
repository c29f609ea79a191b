"""Phi-3 and Phi-4: heads in one tensor, gate and up in another."""

from jaxpar.convert.hf.families.shared import OF_LLAMA, TOP
from jaxpar.convert.hf.family import COMMON, SILU, Family
from jaxpar.convert.hf.names import Name, Names, together

_FUSED: dict[str, Name] = {
    **together("self_attn.qkv_proj.weight", "+ a", "wq", "wk", "wv"),
    **together("mlp.gate_up_proj.weight", "+ a", "w_gate", "w_up"),
}

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA | _FUSED),
    fields=COMMON,
    defaults={
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
    },
    required=SILU
    | dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), False)
    | {"full_attn_mod": 1, "interpolate_factor": 1},
    sliding=True,
    ropes=("default", "longrope"),
    rope_fraction=1.0,
    heads_fill_model=True,
)
