"""The published hybrid families: attention in some layers, a recurrence in the others."""

import dataclasses

from jaxpar.convert.hf.entries import (
    ATTENTION,
    GATED_ATTENTION,
    KIMI_DELTA,
    LATENT_ATTENTION,
    LAYER,
    MIXTRAL_EXPERTS,
    MLP,
    MLP_NORM,
    QK_NORM,
    QWEN3_5_DELTA_NET,
    QWEN3_NEXT_DELTA_NET,
    QWEN3_NEXT_EXPERTS,
    TOP,
    of_delta_layers,
    of_stack,
    sections,
)
from jaxpar.convert.hf.family import COMMON, Family
from jaxpar.convert.hf.tensor_layout import Entry

SILU = {"hidden_act": "silu"}

OF_DELTA_NET = {
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_value_head_dim": "linear_value_head_dim",
    "conv_kernel_size": "linear_conv_kernel_dim",
}
_DELTA_NET_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    entries=(
        *(*TOP, *GATED_ATTENTION, *QK_NORM, *MLP_NORM, *QWEN3_NEXT_EXPERTS),
        *of_delta_layers((ATTENTION[0], *QWEN3_NEXT_DELTA_NET, *MLP_NORM, *QWEN3_NEXT_EXPERTS)),
    ),
    fields=COMMON
    | OF_DELTA_NET
    | {
        "d_ff": "moe_intermediate_size",
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "normalize_experts": "norm_topk_prob",
    },
    fixed={
        "qk_norm": True,
        "norm_offset": True,
        "attention_gate": True,
        "num_shared_experts": 1,
        "shared_expert_gate": True,
    },
    defaults=_DELTA_NET_DEFAULTS
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
    mtp_prefix="mtp.",
)
QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    entries=(
        *(*TOP, *GATED_ATTENTION, *QK_NORM, *MLP),
        *of_delta_layers((ATTENTION[0], *QWEN3_5_DELTA_NET, *MLP)),
    ),
    fields=COMMON | OF_DELTA_NET,
    fixed={"qk_norm": True, "norm_offset": True, "attention_gate": True},
    defaults=_DELTA_NET_DEFAULTS | {"num_key_value_heads": 4},
    required=SILU | {"attention_bias": False, "attn_output_gate": True, "mlp_only_layers": []},
    rope_fraction=0.25,
    mrope=True,
    hybrid=True,
    mtp_prefix="mtp.",
)


_BLOCK = "backbone.layers.{L}."
_MIXER = _BLOCK + "mixer."
_MAMBA, _MLP = _MIXER.replace("{L}", "{M}"), _MIXER.replace("{L}", "{U}")
_NEMOTRON_H_ATTENTION = tuple(
    dataclasses.replace(entry, name=f"{_MIXER}{entry.name.rpartition('self_attn.')[2]}")
    for entry in ATTENTION[1:]
)
_MAMBA_CHANNELS = {"x": "tp", "b": "sn", "c": "sn"}
_MAMBA_COLUMNS = {"z": "tp"} | _MAMBA_CHANNELS | {"dt": "t"}
_NEMOTRON_H_MAMBA = (
    *sections(
        {f"mamba_layers/mamba_{n}": f"MD{dims}" for n, dims in _MAMBA_COLUMNS.items()},
        _MAMBA + "in_proj.weight",
        "+ D",
        tuple(_MAMBA_COLUMNS.values()),
    ),
    *sections(
        {f"mamba_layers/mamba_conv_{n}": f"M{dims}w" for n, dims in _MAMBA_CHANNELS.items()},
        _MAMBA + "conv1d.weight",
        "+ 1 w",
        tuple(_MAMBA_CHANNELS.values()),
    ),
    *sections(
        {f"mamba_layers/mamba_bias_{n}": f"M{dims}" for n, dims in _MAMBA_CHANNELS.items()},
        _MAMBA + "conv1d.bias",
        "+",
        tuple(_MAMBA_CHANNELS.values()),
    ),
    Entry("mamba_layers/mamba_a_log", _MAMBA + "A_log", "Mt", "t"),
    Entry("mamba_layers/mamba_dt_bias", _MAMBA + "dt_bias", "Mt", "t"),
    Entry("mamba_layers/mamba_d", _MAMBA + "D", "Mt", "t"),
    Entry("mamba_layers/mamba_norm", _MAMBA + "norm.weight", "Mtp", "tp"),
    Entry("mamba_layers/mamba_out", _MAMBA + "out_proj.weight", "MtpD", "D tp"),
)
NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    entries=(
        Entry("embed", "backbone.embeddings.weight", "VD", "V D"),
        Entry("final_norm", "backbone.norm_f.weight", "D", "D"),
        TOP[2],
        Entry("layers/attn_norm", _BLOCK + "norm.weight", "LD", "D"),
        *_NEMOTRON_H_ATTENTION,
        Entry("mamba_layers/attn_norm", "backbone.layers.{M}.norm.weight", "MD", "D"),
        *_NEMOTRON_H_MAMBA,
        Entry("mlp_layers/mlp_norm", "backbone.layers.{U}.norm.weight", "UD", "D"),
        Entry("mlp_layers/w_up", _MLP + "up_proj.weight", "UDF", "F D"),
        Entry("mlp_layers/w_down", _MLP + "down_proj.weight", "UFD", "D F"),
    ),
    fields=COMMON
    | {
        "norm_eps": "layer_norm_epsilon",
        "mamba_num_heads": "mamba_num_heads",
        "mamba_head_dim": "mamba_head_dim",
        "mamba_state_size": "ssm_state_size",
        "mamba_num_groups": "n_groups",
        "mamba_min_step": "time_step_min",
        "conv_kernel_size": "conv_kernel",
    },
    fixed={"mlp_gate": False, "activation": "relu_squared", "rope_fraction": 0.0},
    defaults={
        "num_key_value_heads": 8,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_min": 0.001,
    },
    required={
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    aliases={"attention_head_dim": "head_dim"},
    rope=False,
    letters="M*-",
    mtp_prefix="mtp.",
)
_EXPERTS_BLOCK = _BLOCK.replace("{L}", "{O}")
_EXPERTS = _EXPERTS_BLOCK + "mixer."
#: Nemotron 3: layers with experts. Dense layers beside them have their own width.
NEMOTRON_H_EXPERTS = dataclasses.replace(
    NEMOTRON_H,
    entries=(
        *(a for a in NEMOTRON_H.entries if not a.path.startswith("mlp_layers/w")),
        Entry("mlp_layers/w_up", _MLP + "up_proj.weight", "UDW", "W D"),
        Entry("mlp_layers/w_down", _MLP + "down_proj.weight", "UWD", "D W"),
        Entry("moe_layers/mlp_norm", _EXPERTS_BLOCK + "norm.weight", "OD", "D"),
        Entry("moe_layers/router", _EXPERTS + "gate.weight", "ODE", "E D"),
        Entry("moe_layers/router_bias", _EXPERTS + "gate.e_score_correction_bias", "OE", "E"),
        Entry("moe_layers/w_up", _EXPERTS + "experts.{E}.up_proj.weight", "OEDF", "F D"),
        Entry("moe_layers/w_down", _EXPERTS + "experts.{E}.down_proj.weight", "OEFD", "D F"),
        Entry("moe_layers/w_shared_up", _EXPERTS + "shared_experts.up_proj.weight", "ODS", "S D"),
        Entry(
            "moe_layers/w_shared_down", _EXPERTS + "shared_experts.down_proj.weight", "OSD", "D S"
        ),
    ),
    fields=NEMOTRON_H.fields
    | {
        "d_ff": "moe_intermediate_size",
        "dense_d_ff": "intermediate_size",
        "num_experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "normalize_experts": "norm_topk_prob",
        "router_groups": "n_group",
        "router_groups_per_token": "topk_group",
        "router_scale": "routed_scaling_factor",
    },
    same_as={"dense_d_ff": "d_ff"},
    fixed=NEMOTRON_H.fixed | {"router_score": "sigmoid", "router_bias": True},
    at_least={"num_shared_experts": 1},
    defaults=NEMOTRON_H.defaults
    | {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "intermediate_size": 21504,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    required=NEMOTRON_H.required | {"moe_latent_size": None, "n_shared_experts": 1},
    letters="M*E-",
    shared_width="moe_shared_expert_intermediate_size",
)

_SHARED = LAYER + "block_sparse_moe.shared_experts."
_KIMI_EXPERTS = (
    *MLP_NORM,
    *MIXTRAL_EXPERTS,
    Entry("layers/router_bias", LAYER + "block_sparse_moe.gate.e_score_correction_bias", "LE", "E"),
    Entry("layers/w_shared_gate", _SHARED + "gate_proj.weight", "LDS", "S D"),
    Entry("layers/w_shared_up", _SHARED + "up_proj.weight", "LDS", "S D"),
    Entry("layers/w_shared_down", _SHARED + "down_proj.weight", "LSD", "D S"),
)
_DENSE_MLP = tuple(
    dataclasses.replace(a, ours=a.ours.replace("F", "W"), theirs=a.theirs.replace("F", "W"))
    for a in MLP
)
_KIMI_DELTA = (ATTENTION[0], *KIMI_DELTA)
KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    entries=(
        *(*TOP, *LATENT_ATTENTION, *_KIMI_EXPERTS),
        *of_stack("kda_layers", "T", (*_KIMI_DELTA, *_KIMI_EXPERTS)),
        *of_stack("kda_dense_layers", "y", (*_KIMI_DELTA, *_DENSE_MLP)),
    ),
    fields={ours: key for ours, key in COMMON.items() if ours != "head_dim"}
    | {
        "d_ff": "moe_intermediate_size",
        "dense_d_ff": "intermediate_size",
        "num_experts": "num_experts",
        "num_shared_experts": "num_shared_experts",
        "experts_per_token": "num_experts_per_token",
        "normalize_experts": "moe_renormalize",
        "router_groups": "num_expert_group",
        "router_groups_per_token": "topk_group",
        "router_scale": "routed_scaling_factor",
    },
    same_as={"dense_d_ff": "d_ff"},
    fixed={
        "rope_fraction": 0.0,
        "latent_norm_eps": 1e-6,
        "router_score": "sigmoid",
        "router_bias": True,
    },
    at_least={"kv_lora_rank": 1, "num_shared_experts": 1, "num_experts": 1},
    defaults={
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_shared_experts": 1,
        "num_experts_per_token": 8,
        "moe_renormalize": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    required=SILU
    | {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
    | {"attention_bias": False, "num_nextn_predict_layers": 0, "mla_use_output_gate": False},
    rope=False,
    kimi_linear=True,
)
