"""Names of tensors and groups of keys that families share."""

from jaxpar.components.experts import BALANCING_BIAS
from jaxpar.convert.hf.names import Name, together

TOP = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "final_norm_bias": "model.norm.bias",
    "head": "lm_head.weight",
}
NORMS: dict[str, Name] = {
    "attn_norm": "input_layernorm.weight",
    "attn_norm_bias": "input_layernorm.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_norm_bias": "post_attention_layernorm.bias",
}
#: Gemma's: four norms in a layer.
NORMS_AROUND: dict[str, Name] = {
    "attn_norm": "input_layernorm.weight",
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
#: OLMo 2's: norms of outputs.
NORMS_AFTER: dict[str, Name] = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
ATTENTION: dict[str, Name] = {
    **{f"w{n}": f"self_attn.{n}_proj.weight" for n in "qkvo"},
    **{f"b{n}": f"self_attn.{n}_proj.bias" for n in "qkvo"},
    **{f"{n}_norm": f"self_attn.{n}_norm.weight" for n in "qk"},
}
#: A head's queries, then its output gate.
GATED_ATTENTION: dict[str, Name] = {
    **ATTENTION,
    **together("self_attn.q_proj.weight", "b+ a", "wq", "w_attn_gate"),
}
LATENT_ATTENTION: dict[str, Name] = {
    "wq": "self_attn.q_proj.weight",
    "wq_a": "self_attn.q_a_proj.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "wq_b": "self_attn.q_b_proj.weight",
    "wkv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "wkv_b": "self_attn.kv_b_proj.weight",
    "wo": "self_attn.o_proj.weight",
}
_PARTS = ("gate", "up", "down")
MLP: dict[str, Name] = {
    **{f"w_{n}": f"mlp.{n}_proj.weight" for n in _PARTS},
    **{f"b_{n}": f"mlp.{n}_proj.bias" for n in _PARTS},
}
OF_LLAMA = NORMS | ATTENTION | MLP


def sigmoid_router(gate: str) -> dict[str, Name]:
    """Return the names of a router's weights, with the bias by which it chooses (DeepSeek-V3)."""
    return {"router": f"{gate}.weight", BALANCING_BIAS: f"{gate}.e_score_correction_bias"}


EXPERTS: dict[str, Name] = {
    **sigmoid_router("mlp.gate"),
    **{f"w_{n}": f"mlp.experts.{{E}}.{n}_proj.weight" for n in _PARTS},
    **{f"w_shared_{n}": f"mlp.shared_experts.{n}_proj.weight" for n in _PARTS},
}
MIXTRAL_EXPERTS: dict[str, Name] = {
    "router": "block_sparse_moe.gate.weight",
    "w_gate": "block_sparse_moe.experts.{E}.w1.weight",
    "w_up": "block_sparse_moe.experts.{E}.w3.weight",
    "w_down": "block_sparse_moe.experts.{E}.w2.weight",
}
#: What modules for multi-token prediction have beside their layer (DeepSeek-V3).
MODULES = {
    "embed_norm": "enorm.weight",
    "hidden_norm": "hnorm.weight",
    "w_join": "eh_proj.weight",
    "out_norm": "shared_head.norm.weight",
}
COPIES = {
    "model.layers.{P}.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.{P}.shared_head.head.weight": "lm_head.weight",
}
_DELTA = "linear_attn."
#: What Gated DeltaNet has in all of Qwen's families.
DELTA_NET: dict[str, Name] = {
    **together(_DELTA + "conv1d.weight", "+ 1 c", *(f"delta_conv_{n}" for n in "qkv")),
    "delta_a_log": _DELTA + "A_log",
    "delta_dt_bias": _DELTA + "dt_bias",
    "delta_norm": _DELTA + "norm.weight",
    "delta_out": _DELTA + "out_proj.weight",
}

#: Both biases of attention.
BIASES = {"Attention.bias": "attention_bias", "Attention.out_bias": "attention_bias"}
#: Fields of DeepSeek-V3's relatives: some dense layers, then experts chosen by a sigmoid router.
OF_SIGMOID_ROUTERS = {
    "Experts.expert.d_ff": "moe_intermediate_size",
    "Glu.d_ff": "intermediate_size",
    "Experts.num_experts": "n_routed_experts",
    "Experts.num_shared_experts": "n_shared_experts",
    "Experts.experts_per_token": "num_experts_per_tok",
    "Experts.router.normalize": "norm_topk_prob",
    "Experts.router.groups": "n_group",
    "Experts.router.groups_per_token": "topk_group",
    "Experts.router.scale": "routed_scaling_factor",
}
SIGMOID = {"Experts.router.score": "sigmoid", "Experts.router.balancing_bias": True}
#: The width of dense layers where there are none.
WIDTHS = {"Glu.d_ff": "Experts.expert.d_ff"}
AT_LEAST_ONE_SHARED = {"Experts.num_shared_experts": 1}
OF_DELTA_NET = {
    "GatedDeltaNet.num_key_heads": "linear_num_key_heads",
    "GatedDeltaNet.num_value_heads": "linear_num_value_heads",
    "GatedDeltaNet.key_head_dim": "linear_key_head_dim",
    "GatedDeltaNet.value_head_dim": "linear_value_head_dim",
    "GatedDeltaNet.conv_kernel_size": "linear_conv_kernel_dim",
}
DELTA_NET_DEFAULTS = {
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
#: Names that transformers takes for the number of modules.
MTP_TAKEN = {"num_mtp_layers": "num_nextn_predict_layers"}
