"""Mixtral."""

from jaxpar.components.experts import Experts
from jaxpar.convert.hf.families.shared import MIXTRAL_EXPERTS, OF_LLAMA, TOP
from jaxpar.convert.hf.family import OF_ATTENTION, OF_MODEL, SILU, Family
from jaxpar.convert.hf.names import Names

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names=Names(top=TOP, weights=OF_LLAMA, experts=MIXTRAL_EXPERTS),
    feed_forward=Experts,
    fields=OF_MODEL
    | OF_ATTENTION
    | {
        "Experts.expert.d_ff": "intermediate_size",
        "Experts.num_experts": "num_local_experts",
        "Experts.experts_per_token": "num_experts_per_tok",
    },
    fixed={"Experts.router.normalize": True},
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    required=SILU,
    taken={"num_experts": "num_local_experts"},
    renamed={r"(?<=model\.layers\.)(\d+)\.mlp\.(gate|experts)\.": r"\1.block_sparse_moe.\2."},
    sliding=True,
)
