"""Ministral 3: yarn, with queries that grow."""

from jaxpar.convert.hf.families.shared import OF_LLAMA, TOP
from jaxpar.convert.hf.family import COMMON, SILU, Family
from jaxpar.convert.hf.names import Names

MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA),
    fields=COMMON,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    required=SILU,
    sliding=True,
    ropes=("yarn",),
    query_beta=True,
)
