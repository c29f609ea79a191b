"""Changes to a published config.json that give one setting a second form, or another value in it.

`goldens/make_published.py` records what transformers makes of each, in another environment: only
the standard library is used here.
"""

from typing import Any

Values = dict[str, Any]

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}

#: Keys with another value, whatever the file has.
PLAIN: dict[str, tuple[Any, ...]] = {
    "rope_theta": (1234.0,),
    "rotary_emb_base": (1234.0,),
    "rope_local_base_freq": (1234.0,),
    "partial_rotary_factor": (0.5,),
    "rotary_pct": (0.5,),
    "original_max_position_embeddings": (1234,),
    "rope_scaling": (
        YARN,
        YARN | {"rope_theta": 1234.0},
        {"rope_type": "default"},
        {"type": "linear", "factor": 2.0},
        {"type": "linear", "rope_type": "yarn", "factor": 2.0},
        {"factor": 2.0},
    ),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 1234.0},
        YARN | {"rope_theta": 1234.0},
        {"rope_theta": 1234.0, "partial_rotary_factor": 0.5},
        {FULL: {"rope_theta": 1234.0}, SLIDING: {"rope_theta": 123.0}},
        None,
        {},
    ),
    "sliding_window_pattern": (3,),
    "_sliding_window_pattern": (3,),
    "use_sliding_window": (True, False),
    "max_window_layers": (1,),
    "sliding_window": (77, None),
    "full_attention_interval": (2,),
    "no_rope_layer_interval": (2,),
    "head_dim": (32,),
    "attention_head_dim": (32,),
    "qk_head_dim": (32,),
    "num_experts": (3,),
    "num_local_experts": (3,),
    "n_routed_experts": (3,),
    "num_experts_per_tok": (3,),
    "num_experts_per_token": (3,),
    "experts_per_token": (3,),
    "n_shared_experts": (3,),
    "num_shared_experts": (3,),
    "n_group": (2,),
    "num_expert_group": (2,),
    "norm_topk_prob": (True, False),
    "moe_renormalize": (True, False),
    "num_mtp_layers": (2,),
    "linear_head_dim": (32,),
    "first_k_dense_replace": (2,),
    "global_head_dim": (32,),
    "hidden_size": (64,),
    "n_embd": (64,),
    "num_attention_heads": (4,),
    "n_head": (4,),
    "max_position_embeddings": (999,),
    "n_positions": (999,),
    "model_max_length": (999,),
    "moe_layers": ([0],),
}

#: Keys of layers, of which a list has as many as the model.
OF_LAYERS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "layer_types": ((FULL,), (SLIDING,), (LINEAR, FULL), (SLIDING, FULL), (LINEAR,) * 3 + (FULL,)),
    "no_rope_layers": ((1, 0), (1, 1)),
    "mlp_layer_types": (("dense", "sparse"), ("dense",)),
    "layers_block_type": ((LINEAR, "mlp", FULL, "moe"),),
}


def changes(values: Values) -> dict[str, tuple[str, Values]]:
    """Return {name: (the key that is changed, the changed file)}, without changes of nothing."""
    found = {}
    options = {key: list(values) for key, values in PLAIN.items()}
    count = values.get("num_hidden_layers") or values.get("n_layer")
    count = count or len(values.get("layers_block_type") or ()) or 4
    for key, patterns in OF_LAYERS.items():
        options[key] = [(list(p) * count)[:count] for p in patterns]
    options["hybrid_override_pattern"] = [("M-*E" * count)[:count]]
    if "linear_attn_config" in values:
        config = values["linear_attn_config"]
        options["linear_attn_config"] = [config | {"head_dim": 32}]
    for key, new in options.items():
        for i, value in enumerate(new):
            if key not in values or values[key] != value:
                found[f"{key}.{i}"] = key, values | {key: value}
    return found
