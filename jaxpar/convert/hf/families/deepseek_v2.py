"""DeepSeek-V2-Lite: multi-head latent attention."""

from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Glu
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.convert.hf.families.shared import (
    AT_LEAST_ONE_SHARED,
    EXPERTS,
    LATENT_ATTENTION,
    MLP,
    NORMS,
    OF_SIGMOID_ROUTERS,
    TOP,
    WIDTHS,
)
from jaxpar.convert.hf.family import OF_MODEL, SILU, Family
from jaxpar.convert.hf.names import Names

_FIELDS = OF_MODEL | OF_SIGMOID_ROUTERS | {"LatentAttention.num_heads": "num_attention_heads"}
_WITHOUT = ("Experts.router.normalize", "Experts.router.groups")

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    names=Names(top=TOP, weights=NORMS | LATENT_ATTENTION | MLP, experts=EXPERTS),
    mixer=LatentAttention,
    feed_forward=Experts,
    others=(Glu,),
    fields={address: key for address, key in _FIELDS.items() if not address.startswith(_WITHOUT)},
    instead=WIDTHS,
    fixed={"Experts.router.normalize": False},
    at_least=AT_LEAST_ONE_SHARED,
    defaults={
        "rms_norm_eps": 1e-6,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    required=SILU
    | {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
    | {"moe_layer_freq": 1, "attention_bias": False, "mlp_bias": False},
    equal_keys={"num_key_value_heads": "num_attention_heads"},
    taken={"num_experts": "n_routed_experts"},
    dense_first="first_k_dense_replace",
    rope_layout="interleaved",
    latent=True,
)
