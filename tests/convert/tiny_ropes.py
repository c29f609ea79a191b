"""The parameters of RoPEs: of tiny models, and as published."""

#: Turns of the slow frequencies within NUM_TOKENS pass the threshold many times over.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


#: Dims that turn often in 32 tokens, that hardly turn, and some between.
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + 0.03 * pair for pair in range(24)],
    "long_factor": [1.0 + 0.1 * pair**2 for pair in range(24)],
}


#: RoPEs by name: (head_dim, parameters, whether the sequence is longer than the original).
ROPES = {
    "plain": (128, {"rope_type": "default", "rope_theta": 500000.0}, False),
    "llama3_1": (128, LLAMA3 | {"rope_theta": 500000.0}, False),
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
        YARN | {"rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768},
        False,
    ),
    "deepseek_v2_lite": (
        64,
        YARN
        | {"rope_theta": 10000.0, "factor": 40, "original_max_position_embeddings": 4096}
        | {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.5},
        False,
    ),
    "given_factor": (
        32,
        YARN | {"rope_theta": 100.0, "attention_factor": 1.25, "partial_rotary_factor": 0.5},
        False,
    ),
    "short": (64, LONGROPE, False),
    "long": (64, LONGROPE, True),
}
