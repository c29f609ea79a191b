"""OLMo 2: norms of outputs, and one of queries and keys."""

from jaxpar.components.attention import QkNorm
from jaxpar.convert.hf.families.shared import ATTENTION, BIASES, MLP, NORMS_AFTER, TOP
from jaxpar.convert.hf.family import COMMON, SILU, Family
from jaxpar.convert.hf.names import Names

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    names=Names(top=TOP, weights=NORMS_AFTER | ATTENTION | MLP),
    fields=COMMON | BIASES,
    fixed={"Attention.qk_norm": QkNorm(over="all"), "Layer.norms": "after"},
    defaults={"rms_norm_eps": 1e-5, "attention_bias": False},
    required=SILU,
    heads_fill_model=True,
)
