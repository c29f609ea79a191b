"""Megatron-LM's arguments, as a checkpoint holds them, as the keys of a config.json."""

from typing import Any

from jaxpar.config import ConfigError
from jaxpar.convert.hf.config_file import Values
from jaxpar.convert.hf.families import LLAMA, MIXTRAL
from jaxpar.convert.hf.family import Family
from jaxpar.convert.megatron.pickle_tree import Built, Pairs, UnreadablePickle

#: Keys of config.json, by the argument with the same meaning.
KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "max_position_embeddings": "max_position_embeddings",
}

#: Arguments that change what a model computes, and the only value that is supported. A missing
#: argument, of an older version, has it.
REQUIRED = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "apply_layernorm_1p": False,
    "multi_latent_attention": False,
    "window_size": None,
    "apply_residual_connection_post_layernorm": False,
    "softmax_type": "vanilla",
    "attention_output_gate": False,
    "no_rope_freq": None,
    "mtp_num_layers": None,
}

#: The same for models with experts.
REQUIRED_OF_EXPERTS = {
    "moe_layer_freq": 1,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_apply_probs_on_input": False,
}

#: RoPE scaling of --use-rope-scaling: fixed in Megatron-LM, but for the factor.
_ROPE_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def arguments_of(common: Any, where: str) -> dict[str, Any]:
    """Return the arguments of a checkpoint, by name.

    Args:     common: `Checkpoint.common()`. where: for messages.
    Raises:   ConfigError when it has none.
    """
    if isinstance(common, list) and common:
        common = common[0]
    found = common.by_name().get("args") if isinstance(common, Pairs) else None
    try:
        if isinstance(found, Built) and found.of.name == "argparse.Namespace":
            return found.fields()
    except UnreadablePickle:
        pass
    rule = "does not hold Megatron-LM's arguments, which describe the model"
    fix = "use a checkpoint of Megatron-LM's pretrain_gpt.py"
    raise ConfigError("DIR", where, rule, fix)


def values_of(arguments: dict[str, Any]) -> tuple[Values, Family]:
    """Return the keys of a config.json, and the family.

    Raises:   ConfigError that names the argument that is missing or not supported.
    """
    experts = arguments.get("num_experts")
    for name, wanted in (REQUIRED | (REQUIRED_OF_EXPERTS if experts else {})).items():
        _check(name, arguments.get(name, wanted), wanted)
    values: Values = {}
    for name, key in KEYS.items():
        values[key] = _number(name, arguments.get(name))
    heads = values["num_attention_heads"]
    grouped = arguments.get("group_query_attention", False)
    groups = arguments.get("num_query_groups") if grouped else heads
    values["num_key_value_heads"] = _number("num_query_groups", groups)
    values["tie_word_embeddings"] = not arguments.get("untie_embeddings_and_output_weights", False)
    if arguments.get("use_rope_scaling"):
        factor = _number("rope_scaling_factor", arguments.get("rope_scaling_factor", 8.0))
        values["rope_scaling"] = _ROPE_SCALING | {"factor": float(factor)}
    family = MIXTRAL if experts else LLAMA
    if experts:
        values["num_local_experts"] = _number("num_experts", experts)
        topk = arguments.get("moe_router_topk", 2)
        values["num_experts_per_tok"] = _number("moe_router_topk", topk)
        width = arguments.get("moe_ffn_hidden_size") or arguments.get("ffn_hidden_size")
        values["intermediate_size"] = _number("moe_ffn_hidden_size", width)
    values |= {"architectures": [family.architecture], "model_type": family.model_type}
    return values | {"hidden_act": "silu"}, family


def _check(name: str, found: Any, wanted: Any) -> None:
    good = found == wanted if isinstance(found, bool | int | float | str) else found is wanted
    if not good:
        shown = found if isinstance(found, bool | int | float | str | None) else "(an object)"
        rule = "is not supported for a checkpoint of Megatron-LM"
        raise ConfigError(f"--{name.replace('_', '-')}", shown, rule, f"it must be {wanted!r}")


def _number(name: str, found: Any) -> int | float:
    if isinstance(found, bool) or not isinstance(found, int | float):
        shown = found if isinstance(found, bool | str | None) else "(an object)"
        fix = "use a checkpoint of Megatron-LM's pretrain_gpt.py"
        raise ConfigError(f"--{name.replace('_', '-')}", shown, "must be a number", fix)
    return found
