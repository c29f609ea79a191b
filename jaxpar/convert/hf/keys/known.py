"""The keys of config.json that jaxpar knows, in any family: others may change the model."""

from typing import Any

from jaxpar.convert.hf.config_file import HOLDS, Values
from jaxpar.convert.hf.family import COMMON, Family
from jaxpar.convert.hf.keys import global_heads, kimi_linear, two_forms

#: Keys that transformers has written for any model: how it is run, how its text is generated, and
#: what other kinds of models would do.
OF_TRANSFORMERS = """_attn_implementation_autoset _commit_hash _name_or_path architectures
    attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    cache_implementation chunk_size_feed_forward classifier_dropout custom_generate
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty experts_implementation finetuning_task forced_bos_token_id
    forced_eos_token_id guidance_scale id2label is_decoder label2id length_penalty max_length
    max_new_tokens min_length min_p model_type no_repeat_ngram_size num_beam_groups num_beams
    num_labels num_return_sequences output_attentions output_hidden_states output_router_logits
    output_scores pad_token_id prefix problem_type remove_invalid_values repetition_penalty
    return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_last_hidden_states tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p unk_token_id use_bfloat16 use_cache""".split()

#: Keys of families that do not change what a model computes, but for dropout, which there is none
#: of.
HARMLESS = frozenset(
    """activation_dropout activation_function attention_dropout attn_pdrop aux_loss_alpha
    embd_pdrop embedding_dropout ep_size for_llm_compressor head_dropout hidden_act hidden_dropout
    initial_context_length initializer_range linear_a_log_max linear_a_log_min
    linear_dt_init_floor linear_dt_max linear_dt_min mamba_ssm_dtype max_position_embeddings
    model_max_length mtp_num_hidden_layers mtp_use_dedicated_embeddings n_ctx n_positions
    original_max_position_embeddings pretraining_tp reorder_and_upcast_attn resid_pdrop
    residual_dropout router_aux_loss_coef router_jitter_noise
    seq_aux summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj""".split()
)

#: Keys of Nemotron-H that do not change what a model computes: its layers' letters, which the model
#: has in its own form, Mamba's steps, of the initialization or for decoding, and layers for
#: multi-token prediction.
OF_LETTERS = frozenset(
    """hybrid_override_pattern layers_block_type time_step_min time_step_max time_step_floor
    time_step_limit time_step_rank chunk_size expand mamba_ssm_cache_dtype
    moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type norm_eps
    num_logits_to_keep num_nextn_predict_layers partial_rotary_factor rescale_prenorm_residual
    residual_in_fp32 use_mamba_kernels""".split()
)

#: Keys with the only supported value, which all families may have.
REQUIRED: dict[str, Any] = {
    "quantization_config": None,
    "is_encoder_decoder": False,
    "use_qk_norm": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
    "use_sliding_window": False,
}


def unknown(values: Values, family: Family) -> Values:
    """Return the keys of config.json that are not null and that the family does not have."""
    known = {*family.fields.values(), *family.required, *family.aliases, *family.defaults}
    known |= family.equal_keys.keys() | two_forms.names(family)
    known |= HARMLESS | set(OF_TRANSFORMERS) | REQUIRED.keys() | HOLDS.keys()
    known |= set(COMMON.values())
    known |= {"n_group", "topk_group"} if "topk_method" in family.required else set()
    known |= {family.shared_width} - {""}
    known |= {"qk_head_dim"} if family.latent or family.kimi_linear else set()
    known |= {"no_rope_layers"} if family.nope else set()
    known |= {"moe_layers"} if family.chunked else set()
    known |= kimi_linear.KEYS if family.kimi_linear else set()
    known |= global_heads.KEYS | global_heads.UNREAD if family.global_heads else set()
    known |= OF_LETTERS if family.letters else set()
    return {key: value for key, value in values.items() if key not in known and value is not None}
