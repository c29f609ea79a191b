"""The model of a published config.json, to train it from scratch: `--model.from`.

Only config.json is read. Unlike an import of weights, every key must be known: one that is not may
change the model.
"""

import dataclasses
import sys
from pathlib import Path

from jaxpar.config import ConfigError, ModelConfig, RopeScaling
from jaxpar.config.layout.layer_kinds import EXPERTS
from jaxpar.convert.hf.config import FREE_MODEL_FIELDS, REQUIRED, family_of, model_of, named_family
from jaxpar.convert.hf.config_file import CONFIG_FILE, HOLDS, Values, read_config_json, refuse
from jaxpar.convert.hf.family import COMMON, Family
from jaxpar.convert.hf.hybrid_families import NEMOTRON_H_EXPERTS
from jaxpar.convert.hf.keys import global_heads, kimi_linear
from jaxpar.model.flops import num_params
from jaxpar.stores import models

#: Keys of config.json that do not change what a model computes, but for dropout, which there is
#: none of.
HARMLESS = frozenset(
    """_name_or_path _sliding_window_pattern experts_per_token hidden_act
    linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min
    initial_context_length activation_dropout architectures aux_loss_alpha attention_dropout
    attn_pdrop auto_map
    bos_token_id cache_implementation classifier_dropout dtype embd_pdrop embedding_dropout
    eos_token_id ep_size head_dropout hidden_dropout id2label initializer_range is_decoder label2id
    max_position_embeddings model_max_length model_type n_ctx n_positions
    original_max_position_embeddings output_router_logits pad_token_id pretraining_tp
    reorder_and_upcast_attn resid_pdrop
    residual_dropout return_dict router_aux_loss_coef router_jitter_noise seq_aux
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params tokenizer_class torch_dtype transformers_version unk_token_id
    use_cache""".split()
)


#: Keys of Nemotron-H that do not change what a model computes: its layers' letters, which the model
#: has in its own form, Mamba's steps, of the initialization or for decoding, and layers for
#: multi-token prediction.
OF_LETTERS = frozenset(
    """hybrid_override_pattern layers_block_type time_step_min time_step_max time_step_floor
    time_step_rank chunk_size expand mamba_ssm_cache_dtype moe_shared_expert_overlap
    mtp_hybrid_override_pattern mtp_layers_block_type norm_eps num_logits_to_keep
    num_nextn_predict_layers partial_rotary_factor rescale_prenorm_residual residual_in_fp32
    use_mamba_kernels""".split()
)

#: Keys about experts, which transformers writes for Nemotron-H without experts, too.
UNREAD = {*NEMOTRON_H_EXPERTS.fields.values(), *NEMOTRON_H_EXPERTS.required} | {
    NEMOTRON_H_EXPERTS.shared_width
}


def model_from(named: str, family: str | None, like: ModelConfig) -> ModelConfig:
    """Return the model of a published config.json, and print its fields on standard error.

    Args:     named: folder, or name on the Hugging Face Hub. family: `model_type` that it must
              have; None for any. like: model with the fields that config.json does not determine,
              such as the compute dtype.
    Raises:   ConfigError that names the key or the option that is wrong or not supported.
    """
    rule = "is not a folder"
    fix = f"use a folder with {CONFIG_FILE}, or org/model of the Hugging Face Hub"
    found = models.find(named, "model.from", (CONFIG_FILE,), rule, fix)
    values = read_config_json(Path(found.folder))
    table = family_of(values)
    kind = table.model_type
    if family is not None and named_family(family, like, "model.family").model_type != kind:
        rule = f"is not the family of {named}, which is {kind}"
        raise ConfigError("model.family", family, rule, f"use --model.family {kind}")
    _refuse_unknown(values, table)
    published = model_of(values, table)
    free = {name: getattr(like, name) for name in sorted(_OF_COMPUTATION)}
    model = dataclasses.replace(published, **free)
    print(in_words(found.name, table, model), file=sys.stderr, flush=True)
    return model


#: The fields of `FREE_MODEL_FIELDS` that say how the model is computed, and begins.
_OF_COMPUTATION = FREE_MODEL_FIELDS - {"experts_per_token", "normalize_experts"}


def in_words(name: str, family: Family, model: ModelConfig) -> str:
    """Describe a model's fields that are not the defaults, in one line."""
    shown = []
    for field in dataclasses.fields(ModelConfig):
        value = getattr(model, field.name)
        if value != field.default and field.name not in FREE_MODEL_FIELDS:
            words = value.kind if isinstance(value, RopeScaling) else value
            shown.append(f"{field.name} {words}")
    size = f"{num_params(model):,} parameters"
    return f"model from {name} (family {family.model_type}): {size}; {', '.join(shown)}"


def _refuse_unknown(values: Values, family: Family) -> None:
    """Raises:   ConfigError that names the first key that the family does not have."""
    known = {*family.fields.values(), *family.required, *family.aliases, *family.defaults}
    known |= family.equal_keys.keys()
    known |= HARMLESS | REQUIRED.keys() | HOLDS.keys() | set(COMMON.values())
    known |= {"n_group", "topk_group"} if "topk_method" in family.required else set()
    known |= {family.shared_width} - {""}
    known |= {"no_rope_layers"} if family.nope else set()
    known |= {"moe_layers"} if family.chunked else set()
    known |= kimi_linear.KEYS if family.kimi_linear else set()
    known |= global_heads.KEYS | global_heads.UNREAD if family.global_heads else set()
    known |= OF_LETTERS if family.letters else set()
    known |= set(UNREAD) if family.letters and EXPERTS not in family.letters else set()
    for key, value in values.items():
        if key not in known and value is not None:
            rule = f"is not a key of {family.model_type} that jaxpar knows: it may change the model"
            fix = "use a config.json without it, if it does not"
            raise refuse(key, value, rule, fix)
