"""StarCoder2: LayerNorm, and a feed-forward without a gate."""

from jaxpar.components.feed_forward import Mlp
from jaxpar.convert.hf.families.shared import ATTENTION, NORMS, TOP
from jaxpar.convert.hf.family import OF_ATTENTION, OF_MODEL, Family
from jaxpar.convert.hf.names import Name, Names

_MLP: dict[str, Name] = {
    "w_up": "mlp.c_fc.weight",
    "b_up": "mlp.c_fc.bias",
    "w_down": "mlp.c_proj.weight",
    "b_down": "mlp.c_proj.bias",
}

STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    names=Names(top=TOP, weights=NORMS | ATTENTION | _MLP),
    feed_forward=Mlp,
    fields=OF_MODEL
    | OF_ATTENTION
    | {"Mlp.d_ff": "intermediate_size", "Norm.eps": "norm_epsilon"}
    | dict.fromkeys(("Attention.bias", "Attention.out_bias", "Mlp.bias"), "use_bias"),
    fixed={"Norm.kind": "layer", "Mlp.activation": "gelu"},
    defaults={
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    required={"hidden_act": "gelu_pytorch_tanh", "norm_type": "layer_norm", "mlp_type": "default"},
    sliding=True,
    heads_fill_model=True,
)
