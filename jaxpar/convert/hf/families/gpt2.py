"""GPT-2: LayerNorm, learned positions, and matrices stored as [in, out]."""

from jaxpar.components.feed_forward import Mlp
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.names import Name, Names, StoredAs, together

_TOP = {
    "embed": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "final_norm": "transformer.ln_f.weight",
    "final_norm_bias": "transformer.ln_f.bias",
    "head": "lm_head.weight",
}
_WEIGHTS: dict[str, Name] = {
    "attn_norm": "ln_1.weight",
    "attn_norm_bias": "ln_1.bias",
    **together("attn.c_attn.weight", "a +", "wq", "wk", "wv"),
    **together("attn.c_attn.bias", "+", "bq", "bk", "bv"),
    "wo": StoredAs("attn.c_proj.weight", "ab c"),
    "bo": "attn.c_proj.bias",
    "mlp_norm": "ln_2.weight",
    "mlp_norm_bias": "ln_2.bias",
    "w_up": StoredAs("mlp.c_fc.weight", "a b"),
    "b_up": "mlp.c_fc.bias",
    "w_down": StoredAs("mlp.c_proj.weight", "a b"),
    "b_down": "mlp.c_proj.bias",
}

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    names=Names(top=_TOP, layer="transformer.h.{L}.", weights=_WEIGHTS),
    feed_forward=Mlp,
    fields={
        "num_layers": "n_layer",
        "d_model": "n_embd",
        "Attention.num_heads": "n_head",
        "Mlp.d_ff": "n_inner",
        "vocab_size": "vocab_size",
        "max_positions": "n_positions",
        "Norm.eps": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
    },
    fixed={
        "Norm.kind": "layer",
        "Mlp.activation": "gelu",
        "Mlp.bias": True,
        "Attention.bias": True,
        "Attention.out_bias": True,
    },
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
    taken={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    rope=False,
    heads_alike=True,
    prefix="transformer.",
    heads_fill_model=True,
)
