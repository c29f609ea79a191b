"""Qwen3-Next: Gated DeltaNet in most layers, and gated attention."""

from jaxpar.components.attention import QkNorm
from jaxpar.components.experts import Experts
from jaxpar.components.recurrent import GatedDeltaNet
from jaxpar.convert.hf.families.shared import (
    DELTA_NET,
    DELTA_NET_DEFAULTS,
    EXPERTS,
    GATED_ATTENTION,
    NORMS,
    OF_DELTA_NET,
    TOP,
)
from jaxpar.convert.hf.family import OF_ATTENTION, OF_MODEL, SILU, Family
from jaxpar.convert.hf.names import Name, Names, StoredAs, together

#: Each key head's rows are together.
_PROJECTIONS: dict[str, Name] = {
    **together("linear_attn.in_proj_qkvz.weight", "b+ a", *(f"delta_{n}" for n in "qkvz")),
    **together("linear_attn.in_proj_ba.weight", "b+ a", *(f"delta_{n}" for n in "ba")),
}
_EXPERTS: dict[str, Name] = {
    **EXPERTS,
    **{f"w_shared_{n}": f"mlp.shared_expert.{n}_proj.weight" for n in ("gate", "up", "down")},
    "w_shared_router": StoredAs("mlp.shared_expert_gate.weight", "1 a"),
}

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    names=Names(
        top=TOP, weights=NORMS | GATED_ATTENTION | DELTA_NET | _PROJECTIONS, experts=_EXPERTS
    ),
    feed_forward=Experts,
    others=(GatedDeltaNet,),
    fields=OF_MODEL
    | OF_ATTENTION
    | OF_DELTA_NET
    | {
        "Experts.expert.d_ff": "moe_intermediate_size",
        "Experts.num_experts": "num_experts",
        "Experts.experts_per_token": "num_experts_per_tok",
        "Experts.router.normalize": "norm_topk_prob",
    },
    equal={"GatedDeltaNet.norm_eps": "Norm.eps"},
    fixed={
        "Attention.qk_norm": QkNorm(),
        "Attention.gate": True,
        "Norm.offset": True,
        "Experts.num_shared_experts": 1,
        "Experts.shared_expert_gate": True,
    },
    defaults=DELTA_NET_DEFAULTS
    | {
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    required=SILU | {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    equal_keys={"shared_expert_intermediate_size": "moe_intermediate_size"},
    rope_fraction=0.25,
    hybrid=True,
    reads_interval=True,
    mtp_prefix="mtp.",
)
