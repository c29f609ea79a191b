"""config.json of a tiny model of each family, and the parameters of published RoPEs."""

_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

#: Turns of the slow frequencies within NUM_TOKENS pass the threshold many times over.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


#: Dims that turn often in 32 tokens, that hardly turn, and some between.
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}


_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + 0.03 * pair for pair in range(24)],
    "long_factor": [1.0 + 0.1 * pair**2 for pair in range(24)],
}


def _model(model_type: str, architecture: str, **values) -> dict:
    return _SHAPE | {"model_type": model_type, "architectures": [architecture]} | values


#: config.json by name. Some have the older form of RoPE's keys, some the current one.
MODELS = {
    "llama2": _model("llama", "LlamaForCausalLM", rope_theta=10000.0, num_key_value_heads=4),
    "llama3": _model("llama", "LlamaForCausalLM", rope_theta=500000.0, rope_scaling=None),
    "llama3_1": _model("llama", "LlamaForCausalLM", rope_theta=10000.0, rope_scaling=_LLAMA3_ROPE),
    "llama3_2": _model(
        "llama",
        "LlamaForCausalLM",
        rope_parameters=_LLAMA3_ROPE | {"rope_theta": 10000.0},
        tie_word_embeddings=True,
        head_dim=16,
    ),
    "llama_biases": _model("llama", "LlamaForCausalLM", attention_bias=True, mlp_bias=True),
    "linear": _model(
        "llama",
        "LlamaForCausalLM",
        rope_theta=10000.0,
        rope_scaling={"type": "linear", "factor": 4.0},
        head_dim=16,
    ),
    "yarn": _model(
        "qwen3",
        "Qwen3ForCausalLM",
        rope_theta=10000.0,
        rope_scaling=_YARN,
        attention_bias=False,
        head_dim=16,
    ),
    "yarn_mscale": _model(
        "llama",
        "LlamaForCausalLM",
        rope_parameters=_YARN
        | {"rope_theta": 10000.0, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}
        | {"beta_fast": 4, "beta_slow": 0.25},
        head_dim=16,
    ),
    "longrope": _model(
        "llama",
        "LlamaForCausalLM",
        rope_theta=10000.0,
        original_max_position_embeddings=32,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5],
            "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 9.0, 12.0, 16.0],
        },
        head_dim=16,
    ),
    "smollm3": _model(
        "smollm3",
        "SmolLM3ForCausalLM",
        num_hidden_layers=4,
        rope_theta=10000.0,
        no_rope_layer_interval=2,
        no_rope_layers=[1, 0, 1, 0],
        tie_word_embeddings=True,
        pad_token_id=0,
    ),
    "helium": _model("helium", "HeliumForCausalLM", rope_theta=10000.0, head_dim=8, pad_token_id=0),
    "mistral": _model(
        "mistral", "MistralForCausalLM", rope_theta=10000.0, sliding_window=48, head_dim=8
    ),
    "qwen2_5": _model(
        "qwen2",
        "Qwen2ForCausalLM",
        rope_theta=1000000.0,
        use_sliding_window=False,
        sliding_window=48,
        max_window_layers=2,
        tie_word_embeddings=True,
    ),
    "qwen3": _model(
        "qwen3",
        "Qwen3ForCausalLM",
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        attention_bias=False,
        head_dim=16,
    ),
    "mixtral": _model(
        "mixtral",
        "MixtralForCausalLM",
        rope_theta=1000000.0,
        sliding_window=None,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen3_moe": _model(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        rope_theta=10000.0,
        rope_scaling=None,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "olmoe": _model(
        "olmoe",
        "OlmoeForCausalLM",
        rope_theta=10000.0,
        rope_scaling=None,
        attention_bias=False,
        clip_qkv=None,
        intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=False,
    ),
    "dots1": _model(
        "dots1",
        "Dots1ForCausalLM",
        num_hidden_layers=3,
        rope_theta=10000.0,
        rope_scaling=None,
        attention_bias=False,
        head_dim=16,
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        sliding_window=None,
        max_window_layers=3,
    ),
    "glm4_moe": _model(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        num_hidden_layers=3,
        rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        attention_bias=True,
        use_qk_norm=True,
        head_dim=16,
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
    ),
    "gemma3_linear": _model(
        "gemma3_text",
        "Gemma3ForCausalLM",
        num_hidden_layers=3,
        rope_theta=100000.0,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window=48,
        sliding_window_pattern=2,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=24,
        head_dim=16,
        tie_word_embeddings=True,
    ),
    "gpt_oss": _model(
        "gpt_oss",
        "GptOssForCausalLM",
        num_hidden_layers=3,
        rope_theta=10000.0,
        rope_scaling=_YARN | {"truncate": False, "beta_fast": 4.0, "beta_slow": 0.25},
        attention_bias=True,
        head_dim=16,
        intermediate_size=64,
        num_local_experts=6,
        num_experts_per_tok=3,
        swiglu_limit=0.8,
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "olmo2": _model(
        "olmo2",
        "Olmo2ForCausalLM",
        rope_theta=10000.0,
        attention_bias=False,
        pad_token_id=0,
    ),
    "olmo3": _model(
        "olmo3",
        "Olmo3ForCausalLM",
        num_hidden_layers=4,
        rope_parameters={
            "full_attention": _YARN | {"rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        attention_bias=False,
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=0,
    ),
    "phi3": _model(
        "phi3", "Phi3ForCausalLM", rope_theta=10000.0, sliding_window=48, pad_token_id=0
    ),
    "phi4_mini": _model(
        "phi3",
        "Phi3ForCausalLM",
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_theta=10000.0,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=32,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5],
            "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 9.0],
        },
        sliding_window=None,
        tie_word_embeddings=True,
        pad_token_id=0,
    ),
    "granite": _model(
        "granite",
        "GraniteForCausalLM",
        rope_theta=10000.0,
        attention_bias=False,
        mlp_bias=False,
        embedding_multiplier=6.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=1.5,
        tie_word_embeddings=True,
    ),
    "gemma2": _model(
        "gemma2",
        "Gemma2ForCausalLM",
        num_hidden_layers=3,
        rope_theta=10000.0,
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=6,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.5,
        head_dim=16,
        tie_word_embeddings=True,
        pad_token_id=0,
    ),
    "ministral3": _model(
        "ministral3",
        "Ministral3ForCausalLM",
        rope_parameters=_YARN
        | {"rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0}
        | {"beta_fast": 4.0, "beta_slow": 0.25, "llama_4_scaling_beta": 0.5},
        sliding_window=None,
        head_dim=16,
        pad_token_id=0,
    ),
    "gemma3": _model(
        "gemma3_text",
        "Gemma3ForCausalLM",
        num_hidden_layers=3,
        rope_theta=100000.0,
        rope_local_base_freq=100.0,
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=24,
        head_dim=16,
        tie_word_embeddings=True,
    ),
}


MODELS["gpt2"] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 64,
    "n_positions": 320,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
for _name, _parallel in {"gpt_neox": False, "pythia": True}.items():
    MODELS[_name] = _model(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        hidden_act="gelu",
        rotary_pct=0.5,
        rotary_emb_base=10000,
        layer_norm_eps=1e-5,
        use_parallel_residual=_parallel,
    )
MODELS["starcoder2"] = _model(
    "starcoder2",
    "Starcoder2ForCausalLM",
    hidden_act="gelu_pytorch_tanh",
    rope_theta=10000.0,
    norm_epsilon=1e-5,
    use_bias=True,
    sliding_window=48,
    tie_word_embeddings=True,
)

#: RoPEs by name: (head_dim, parameters, whether the sequence is longer than the original).
ROPES = {
    "plain": (128, {"rope_type": "default", "rope_theta": 500000.0}, False),
    "llama3_1": (128, _LLAMA3_ROPE | {"rope_theta": 500000.0}, False),
    "linear": (256, {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}, False),
    "gpt_oss": (
        64,
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        False,
    ),
    "qwen3_long": (
        128,
        _YARN | {"rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768},
        False,
    ),
    "deepseek_v2_lite": (
        64,
        _YARN
        | {"rope_theta": 10000.0, "factor": 40, "original_max_position_embeddings": 4096}
        | {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.5},
        False,
    ),
    "given_factor": (
        32,
        _YARN | {"rope_theta": 100.0, "attention_factor": 1.25, "partial_rotary_factor": 0.5},
        False,
    ),
    "short": (64, _LONGROPE, False),
    "long": (64, _LONGROPE, True),
}
