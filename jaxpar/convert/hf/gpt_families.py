"""Tables of families with the GPT-3 block: LayerNorm, and a feed-forward without a gate.

`families.py` has the others, and explains a table.
"""

from jaxpar.convert.hf.entries import (
    ATTENTION,
    GPT2_LAYERS,
    GPT2_TOP,
    NEOX_LAYERS,
    NEOX_TOP,
    OUT_BIAS,
    QKV_BIAS,
    STARCODER2_LAYERS,
    TOP,
)
from jaxpar.convert.hf.family import COMMON, Family

_BLOCK = {"norm": "layer", "mlp_gate": False}

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    entries=(*GPT2_TOP, *GPT2_LAYERS),
    fields={
        "num_layers": "n_layer",
        "d_model": "n_embd",
        "num_heads": "n_head",
        "d_ff": "n_inner",
        "vocab_size": "vocab_size",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
    },
    fixed=_BLOCK
    | {"activation": "gelu", "positions": "learned"}
    | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    required={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    rope=False,
    heads_alike=True,
    prefix="transformer.",
    heads_fill_model=True,
)
GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    entries=(*NEOX_TOP, *NEOX_LAYERS),
    fields={
        "num_layers": "num_hidden_layers",
        "d_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "norm_eps": "layer_norm_eps",
        "tie_embeddings": "tie_word_embeddings",
        "parallel_block": "use_parallel_residual",
        "qkv_bias": "attention_bias",
        "out_bias": "attention_bias",
    },
    fixed=_BLOCK | {"activation": "gelu_exact", "mlp_bias": True},
    defaults={
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "attention_bias": True,
    },
    required={"hidden_act": "gelu"},
    aliases={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    rope_fraction=0.25,
    heads_alike=True,
    heads_fill_model=True,
)
STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    entries=(*TOP, *ATTENTION, *QKV_BIAS, *OUT_BIAS, *STARCODER2_LAYERS),
    fields=COMMON
    | {"norm_eps": "norm_epsilon"}
    | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), "use_bias"),
    fixed=_BLOCK | {"activation": "gelu"},
    defaults={
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    required={
        "hidden_act": "gelu_pytorch_tanh",
        "activation_function": "gelu_pytorch_tanh",
        "norm_type": "layer_norm",
        "mlp_type": "default",
    },
    sliding=True,
    heads_fill_model=True,
)
