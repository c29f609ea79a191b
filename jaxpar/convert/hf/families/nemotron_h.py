"""Nemotron-H and Nemotron 3: Mamba-2, attention, feed-forwards and experts, a layer each."""

from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Mlp
from jaxpar.components.recurrent import Mamba2
from jaxpar.convert.hf.families.shared import AT_LEAST_ONE_SHARED, SIGMOID, sigmoid_router
from jaxpar.convert.hf.family import OF_ATTENTION, OF_MODEL, Family
from jaxpar.convert.hf.names import Name, Names, together

_TOP = {
    "embed": "backbone.embeddings.weight",
    "final_norm": "backbone.norm_f.weight",
    "head": "lm_head.weight",
}
_WEIGHTS: dict[str, Name] = {
    "attn_norm": "norm.weight",
    "mlp_norm": "norm.weight",
    **{f"w{n}": f"mixer.{n}_proj.weight" for n in "qkvo"},
    **{f"w_{n}": f"mixer.{n}_proj.weight" for n in ("up", "down")},
    **together("mixer.in_proj.weight", "+ a", *(f"mamba_{n}" for n in ("z", "x", "b", "c", "dt"))),
    **together("mixer.conv1d.weight", "+ 1 c", *(f"mamba_conv_{n}" for n in "xbc")),
    **together("mixer.conv1d.bias", "+", *(f"mamba_bias_{n}" for n in "xbc")),
    "mamba_a_log": "mixer.A_log",
    "mamba_dt_bias": "mixer.dt_bias",
    "mamba_d": "mixer.D",
    "mamba_norm": "mixer.norm.weight",
    "mamba_out": "mixer.out_proj.weight",
}
_EXPERTS: dict[str, Name] = {
    **sigmoid_router("mixer.gate"),
    **{f"w_{n}": f"mixer.experts.{{E}}.{n}_proj.weight" for n in ("up", "down")},
    **{f"w_shared_{n}": f"mixer.shared_experts.{n}_proj.weight" for n in ("up", "down")},
}

NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    names=Names(top=_TOP, layer="backbone.layers.{L}.", weights=_WEIGHTS, experts=_EXPERTS),
    feed_forward=Mlp,
    others=(Mamba2, Experts),
    fields=OF_MODEL
    | OF_ATTENTION
    | {
        "Norm.eps": "layer_norm_epsilon",
        "Mlp.d_ff": "intermediate_size",
        "Mamba2.num_heads": "mamba_num_heads",
        "Mamba2.head_dim": "mamba_head_dim",
        "Mamba2.state_size": "ssm_state_size",
        "Mamba2.num_groups": "n_groups",
        "Mamba2.min_step": "time_step_min",
        "Mamba2.conv_kernel_size": "conv_kernel",
        "Experts.expert.d_ff": "moe_intermediate_size",
        "Experts.num_experts": "n_routed_experts",
        "Experts.experts_per_token": "num_experts_per_tok",
        "Experts.router.normalize": "norm_topk_prob",
        "Experts.router.groups": "n_group",
        "Experts.router.groups_per_token": "topk_group",
        "Experts.router.scale": "routed_scaling_factor",
    },
    instead={"Mlp.d_ff": "Experts.expert.d_ff"},
    equal={"Mamba2.norm_eps": "Norm.eps"},
    fixed=SIGMOID
    | {
        "Mlp.activation": "relu_squared",
        "Experts.expert": Mlp,
        "Experts.expert.activation": "relu_squared",
    },
    at_least=AT_LEAST_ONE_SHARED,
    defaults={
        "num_key_value_heads": 8,
        "layer_norm_epsilon": 1e-5,
        "intermediate_size": 21504,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_min": 0.001,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    required={
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "moe_latent_size": None,
        "n_shared_experts": 1,
    },
    aliases={"attention_head_dim": "head_dim"},
    taken={"num_local_experts": "n_routed_experts", "layer_types": "layers_block_type"},
    renamed={
        r"^model\.(?=layers\.|embeddings\.|norm_f\.)": "backbone.",
        r"^(backbone|model)\.embedding\.": "backbone.embeddings.",
    },
    rope=False,
    letters=True,
    shared_width="moe_shared_expert_intermediate_size",
    mtp_prefix="mtp.",
)
