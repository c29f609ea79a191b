"""config.json of tiny models of Llama 4."""

from collections.abc import Callable

from tests.convert.tiny_ropes import LLAMA3


def models(model: Callable[..., dict]) -> dict[str, dict]:
    """The models by name. Args:     model: makes one, of its type, class and values."""
    return {
        "llama4_interleaved": model(
            "llama4_text",
            "Llama4ForCausalLM",
            num_hidden_layers=4,
            head_dim=8,
            rope_theta=10000.0,
            rope_scaling=None,
            no_rope_layer_interval=2,
            no_rope_layers=[],
            attention_chunk_size=48,
            attn_temperature_tuning=True,
            attn_scale=0.3,
            floor_scale=32,
            attention_bias=False,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=40,
            use_qk_norm=False,
            pad_token_id=0,
        ),
        "llama4": model(
            "llama4_text",
            "Llama4ForCausalLM",
            num_hidden_layers=4,
            head_dim=8,
            rope_theta=10000.0,
            rope_scaling=LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 1.0},
            no_rope_layer_interval=2,
            no_rope_layers=[],
            attention_chunk_size=48,
            attn_temperature_tuning=True,
            attn_scale=0.3,
            floor_scale=32,
            attention_bias=False,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=1,
            use_qk_norm=True,
            pad_token_id=0,
        ),
    }
