"""GPT-NeoX and Pythia: both branches read the same stream."""

from jaxpar.components.feed_forward import Mlp
from jaxpar.convert.hf.families.shared import BIASES, NORMS
from jaxpar.convert.hf.family import OF_MODEL, Family
from jaxpar.convert.hf.names import Name, Names, together

_TOP = {
    "embed": "gpt_neox.embed_in.weight",
    "final_norm": "gpt_neox.final_layer_norm.weight",
    "final_norm_bias": "gpt_neox.final_layer_norm.bias",
    "head": "embed_out.weight",
}
#: Each head's query, key and value follow one another.
_WEIGHTS: dict[str, Name] = {
    **NORMS,
    **together("attention.query_key_value.weight", "b+ a", "wq", "wk", "wv"),
    **together("attention.query_key_value.bias", "a+", "bq", "bk", "bv"),
    "wo": "attention.dense.weight",
    "bo": "attention.dense.bias",
    "w_up": "mlp.dense_h_to_4h.weight",
    "b_up": "mlp.dense_h_to_4h.bias",
    "w_down": "mlp.dense_4h_to_h.weight",
    "b_down": "mlp.dense_4h_to_h.bias",
}

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    names=Names(top=_TOP, layer="gpt_neox.layers.{L}.", weights=_WEIGHTS),
    feed_forward=Mlp,
    fields=OF_MODEL
    | {
        "Attention.num_heads": "num_attention_heads",
        "Mlp.d_ff": "intermediate_size",
        "Norm.eps": "layer_norm_eps",
        "Layer.parallel": "use_parallel_residual",
    }
    | BIASES,
    switches={"Layer.parallel": ("own_norms", "")},
    fixed={"Norm.kind": "layer", "Mlp.activation": "gelu_exact", "Mlp.bias": True},
    defaults={"layer_norm_eps": 1e-5, "use_parallel_residual": True, "attention_bias": True},
    required={"hidden_act": "gelu"},
    aliases={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    renamed={r"^lm_head\.": "embed_out."},
    rope_fraction=0.25,
    heads_alike=True,
    heads_fill_model=True,
)
