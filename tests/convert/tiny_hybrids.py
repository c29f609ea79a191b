"""config.json of tiny hybrid models, without the keys that all tiny models share."""

#: The norm after a recurrence divides by the length of what it returned, which is small in so small
#: a model: with an eps of 1e-5, transformers in float32 is off by 5e-5 from float64.
_LINEAR = {
    "rms_norm_eps": 0.1,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def _model(model_type: str, architecture: str, **values) -> dict:
    return {"model_type": model_type, "architectures": [architecture]} | values


_NEMOTRON_H = {
    "layer_norm_epsilon": 0.1,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 8,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 32,
    "time_step_min": 0.001,
    "mlp_hidden_act": "relu2",
    "attention_bias": False,
    "pad_token_id": 0,
}

#: By name.
HYBRIDS = {
    "nemotron_h": _model(
        "nemotron_h",
        "NemotronHForCausalLM",
        num_hidden_layers=4,
        hybrid_override_pattern="M*-M",
        **_NEMOTRON_H,
    ),
    "nemotron_3": _model(
        "nemotron_h",
        "NemotronHForCausalLM",
        num_hidden_layers=5,
        hybrid_override_pattern="ME*E-",
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=48,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        **_NEMOTRON_H,
    ),
    "olmo_hybrid": _model(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        num_hidden_layers=3,
        rope_parameters={"rope_theta": None, "rope_type": "default"},
        attention_bias=False,
        num_key_value_heads=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_allow_neg_eigval=True,
        **_LINEAR | {"linear_num_key_heads": 4},
        pad_token_id=0,
    ),
    "qwen3_next": _model(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        attention_bias=False,
        head_dim=16,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        **_LINEAR,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "qwen3_5": _model(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        num_hidden_layers=3,
        rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        attention_bias=False,
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        **_LINEAR,
    ),
}
