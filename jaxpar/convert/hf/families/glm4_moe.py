"""GLM-4.5."""

from jaxpar.components.attention import QkNorm
from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Glu
from jaxpar.convert.hf.families.shared import (
    AT_LEAST_ONE_SHARED,
    COPIES,
    EXPERTS,
    MODULES,
    MTP_TAKEN,
    OF_LLAMA,
    OF_SIGMOID_ROUTERS,
    SIGMOID,
    TOP,
    WIDTHS,
)
from jaxpar.convert.hf.family import OF_ATTENTION, OF_MODEL, SILU, Family
from jaxpar.convert.hf.names import Names

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA, experts=EXPERTS, modules=MODULES),
    feed_forward=Experts,
    others=(Glu,),
    fields=OF_MODEL
    | OF_ATTENTION
    | OF_SIGMOID_ROUTERS
    | {
        "Attention.qk_norm": "use_qk_norm",
        "Attention.bias": "attention_bias",
        "mtp_depth": "num_nextn_predict_layers",
    },
    switches={"Attention.qk_norm": (QkNorm(), None)},
    instead=WIDTHS,
    fixed=SIGMOID,
    at_least=AT_LEAST_ONE_SHARED,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "use_qk_norm": False,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    },
    required=SILU,
    aliases={"num_local_experts": "n_routed_experts"},
    taken=MTP_TAKEN,
    dense_first="first_k_dense_replace",
    rope_fraction=0.5,
    copies=COPIES,
)
