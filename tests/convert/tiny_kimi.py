"""The tensors of Kimi Linear, as its published files have them."""


def shapes(values: dict) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor."""
    D, V = values["hidden_size"], values["vocab_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for i in range(values["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        full = i + 1 in values["linear_attn_config"]["full_attn_layers"]
        mixer = _latent_attention(values, D) if full else _kimi_delta(values, D)
        found |= {f"{layer}self_attn.{name}": shape for name, shape in mixer.items()}
        found |= {layer + n + ".weight": (D,) for n in ("input_layernorm", _AFTER)}
        dense = i < values["first_k_dense_replace"]
        feed_forward = _mlp(values, D) if dense else _experts(values, D)
        found |= {layer + name: shape for name, shape in feed_forward.items()}
    return found | {"model.norm.weight": (D,), "lm_head.weight": (V, D)}


_AFTER = "post_attention_layernorm"


def _kimi_delta(values: dict, D: int) -> dict[str, tuple[int, ...]]:
    linear = values["linear_attn_config"]
    H, K, width = (linear[key] for key in ("num_heads", "head_dim", "short_conv_kernel_size"))
    found: dict[str, tuple[int, ...]] = {f"{n}_proj.weight": (H * K, D) for n in "qkv"}
    found |= {f"{n}_conv1d.weight": (H * K, 1, width) for n in "qkv"}
    found |= {f"{n}_a_proj.weight": (K, D) for n in "fg"}
    found |= {f"{n}_b_proj.weight": (H * K, K) for n in "fg"}
    found |= {"b_proj.weight": (H, D), "A_log": (1, 1, H, 1), "dt_bias": (H * K,)}
    return found | {"o_norm.weight": (K,), "o_proj.weight": (D, H * K)}


def _latent_attention(values: dict, D: int) -> dict[str, tuple[int, ...]]:
    H, C, R, N, I = (  # noqa: E741
        values[key]
        for key in (
            *("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"),
            "v_head_dim",
        )
    )
    return {
        "q_proj.weight": (H * (N + R), D),
        "kv_a_proj_with_mqa.weight": (C + R, D),
        "kv_a_layernorm.weight": (C,),
        "kv_b_proj.weight": (H * (N + I), C),
        "o_proj.weight": (D, H * I),
    }


def _mlp(values: dict, D: int) -> dict[str, tuple[int, ...]]:
    return _glu("mlp.", ("gate_proj", "up_proj", "down_proj"), D, values["intermediate_size"])


def _experts(values: dict, D: int) -> dict[str, tuple[int, ...]]:
    moe, E, F = "block_sparse_moe.", values["num_experts"], values["moe_intermediate_size"]
    found: dict[str, tuple[int, ...]] = {moe + "gate.weight": (E, D)}
    found[moe + "gate.e_score_correction_bias"] = (E,)
    for e in range(E):
        found |= _glu(f"{moe}experts.{e}.", ("w1", "w3", "w2"), D, F)
    wide = values["num_shared_experts"] * F
    return found | _glu(moe + "shared_experts.", ("gate_proj", "up_proj", "down_proj"), D, wide)


def _glu(prefix: str, names: tuple[str, str, str], D: int, F: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}{n}.weight": s for n, s in zip(names, ((F, D), (F, D), (D, F)), strict=True)}
