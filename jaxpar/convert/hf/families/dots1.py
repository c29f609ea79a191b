"""dots.llm1."""

from jaxpar.components.attention import QkNorm
from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Glu
from jaxpar.convert.hf.families.shared import (
    AT_LEAST_ONE_SHARED,
    BIASES,
    EXPERTS,
    OF_LLAMA,
    OF_SIGMOID_ROUTERS,
    SIGMOID,
    TOP,
    WIDTHS,
)
from jaxpar.convert.hf.family import OF_ATTENTION, OF_MODEL, SILU, Family
from jaxpar.convert.hf.names import Names

DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA, experts=EXPERTS),
    feed_forward=Experts,
    others=(Glu,),
    fields=OF_MODEL | OF_ATTENTION | OF_SIGMOID_ROUTERS | BIASES,
    instead=WIDTHS,
    fixed=SIGMOID | {"Attention.qk_norm": QkNorm()},
    at_least=AT_LEAST_ONE_SHARED,
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    required=SILU,
    aliases={"num_local_experts": "n_routed_experts"},
    dense_first="first_k_dense_replace",
    sliding=True,
)
