"""Tensors of the families with the GPT-3 block, as published: names and shapes."""

Shapes = dict[str, tuple[int, ...]]

GPT2 = {
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
_NEOX = {
    "model_type": "gpt_neox",
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu",
    "rotary_pct": 0.5,
    "rotary_emb_base": 10000,
    "layer_norm_eps": 1e-5,
}
#: config.json by name, beside the keys that tiny models share.
OTHERS = {
    "gpt_neox": _NEOX | {"use_parallel_residual": False},
    "pythia": _NEOX | {"use_parallel_residual": True},
    "starcoder2": {
        "model_type": "starcoder2",
        "architectures": ["Starcoder2ForCausalLM"],
        "hidden_act": "gelu_pytorch_tanh",
        "rope_theta": 10000.0,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "sliding_window": 48,
        "tie_word_embeddings": True,
    },
}


def shapes(values: dict) -> Shapes:
    """Of GPT-2, GPT-NeoX or StarCoder2."""
    of = {"gpt2": _gpt2, "gpt_neox": _gpt_neox, "starcoder2": _starcoder2}
    return of[values["model_type"]](values)


def _both(name: str, *shape: int, out: int = 0) -> Shapes:
    """A weight and its bias, whose size is dimension `out` of the weight."""
    return {f"{name}.weight": shape, f"{name}.bias": (shape[out],)}


def _gpt2(values: dict) -> Shapes:
    D, V, F = values["n_embd"], values["vocab_size"], values["n_inner"] or 4 * values["n_embd"]
    top = "transformer."
    found: Shapes = {top + "wte.weight": (V, D), top + "wpe.weight": (values["n_positions"], D)}
    for i in range(values["n_layer"]):
        layer = f"{top}h.{i}."
        for name in ("ln_1", "ln_2"):
            found |= _both(layer + name, D)
        found |= _both(layer + "attn.c_attn", D, 3 * D, out=1)
        found |= _both(layer + "attn.c_proj", D, D)
        found |= _both(layer + "mlp.c_fc", D, F, out=1) | _both(layer + "mlp.c_proj", F, D, out=1)
    return found | _both(top + "ln_f", D)


def _gpt_neox(values: dict) -> Shapes:
    D, V, F = values["hidden_size"], values["vocab_size"], values["intermediate_size"]
    top = "gpt_neox."
    found: Shapes = {top + "embed_in.weight": (V, D)}
    for i in range(values["num_hidden_layers"]):
        layer = f"{top}layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            found |= _both(layer + name, D)
        found |= _both(layer + "attention.query_key_value", 3 * D, D)
        found |= _both(layer + "attention.dense", D, D)
        found |= _both(layer + "mlp.dense_h_to_4h", F, D) | _both(layer + "mlp.dense_4h_to_h", D, F)
    return found | _both(top + "final_layer_norm", D) | {"embed_out.weight": (V, D)}


def _starcoder2(values: dict) -> Shapes:
    D, V, F = values["hidden_size"], values["vocab_size"], values["intermediate_size"]
    kv = D // values["num_attention_heads"] * values["num_key_value_heads"]
    found: Shapes = {"model.embed_tokens.weight": (V, D)}
    for i in range(values["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            found |= _both(layer + name, D)
        for name, rows in {"q_proj": D, "k_proj": kv, "v_proj": kv, "o_proj": D}.items():
            found |= _both(f"{layer}self_attn.{name}", rows, D)
        found |= _both(layer + "mlp.c_fc", F, D) | _both(layer + "mlp.c_proj", D, F)
    return found | _both("model.norm", D)
