"""config.json and the shapes of the tensors of tiny models of Gemma 4 (text)."""

FULL, SLIDING = "full_attention", "sliding_attention"

#: Without the keys that all tiny models share.
MODELS = {
    "gemma4": {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL] * 2,
        "sliding_window": 48,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "rope_theta": 100000.0,
                "partial_rotary_factor": 0.5,
            },
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 2.5,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
}


def shapes(values: dict) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, as published files have them."""
    D, H, F = (values[k] for k in ("hidden_size", "num_attention_heads", "intermediate_size"))
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (values["vocab_size"], D),
        "model.norm.weight": (D,),
    }
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for i, kind in enumerate(values["layer_types"]):
        layer, shared = f"model.layers.{i}.", kind == FULL and values["attention_k_eq_v"]
        K = values["global_head_dim" if kind == FULL else "head_dim"]
        G = values["num_global_key_value_heads" if shared else "num_key_value_heads"]
        attention = {"q_proj": (H * K, D), "k_proj": (G * K, D), "o_proj": (D, H * K)}
        attention |= {"q_norm": (K,), "k_norm": (K,)} | ({} if shared else {"v_proj": (G * K, D)})
        mlp = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
        found |= {f"{layer}self_attn.{name}.weight": shape for name, shape in attention.items()}
        found |= {f"{layer}mlp.{name}.weight": shape for name, shape in mlp.items()}
        found |= {f"{layer}{name}_layernorm.weight": (D,) for name in norms}
        found[f"{layer}layer_scalar"] = (1,)
    return found
