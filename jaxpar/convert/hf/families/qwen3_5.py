"""Qwen3.5 (text): dense, with Gated DeltaNet in most layers."""

from jaxpar.components.attention import QkNorm
from jaxpar.components.recurrent import GatedDeltaNet
from jaxpar.convert.hf.families.shared import (
    DELTA_NET,
    DELTA_NET_DEFAULTS,
    GATED_ATTENTION,
    MLP,
    NORMS,
    OF_DELTA_NET,
    TOP,
)
from jaxpar.convert.hf.family import COMMON, SILU, Family
from jaxpar.convert.hf.names import Name, Names, together

_PROJECTIONS: dict[str, Name] = {
    **together("linear_attn.in_proj_qkv.weight", "+ a", *(f"delta_{n}" for n in "qkv")),
    **{f"delta_{n}": f"linear_attn.in_proj_{n}.weight" for n in "zba"},
}

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    names=Names(top=TOP, weights=NORMS | GATED_ATTENTION | MLP | DELTA_NET | _PROJECTIONS),
    others=(GatedDeltaNet,),
    fields=COMMON | OF_DELTA_NET,
    equal={"GatedDeltaNet.norm_eps": "Norm.eps"},
    fixed={"Attention.qk_norm": QkNorm(), "Attention.gate": True, "Norm.offset": True},
    defaults=DELTA_NET_DEFAULTS | {"num_key_value_heads": 4},
    required=SILU | {"attention_bias": False, "attn_output_gate": True, "mlp_only_layers": []},
    rope_fraction=0.25,
    mrope=True,
    hybrid=True,
    reads_interval=True,
    mtp_prefix="mtp.",
)
