"""Layers of families, adapters, text generation, and tensors of published formats."""

from tests.mutants.fault import Fault

TENSOR, HYBRID = "llama3_8b tensor=2", "quickstart_hybrid tensor=2"
GEMMA, BIASED = "gemma_2/2b tensor=2", "gpt_oss_20b expert=2,data=2"

DECODE, HELD = "jaxpar/model/decode.py", "jaxpar/model/held.py"
GENERATION = "jaxpar/inference/generation.py"
LAYOUT, NAMES = "jaxpar/convert/hf/tensor_layout.py", "jaxpar/convert/hf/names.py"
SHARED = "jaxpar/convert/hf/families/shared.py"

GREEDY = "tests/inference/test_generation.py::test_greedy_text_is_that_of_whole_passes"
GOLDENS = "tests/convert/test_goldens.py::test_logits_are_those_of_transformers"
EVERY_VALUE = (
    "tests/convert/test_tensor_layout.py::test_every_value_of_every_tensor_is_that_of_one_parameter"
)

FAULTS = (
    Fault(
        name="gains_without_their_offset",
        file="jaxpar/model/norm.py",
        old="return parameter + 1.0 if m.norm.offset else parameter",
        new="return parameter",
        certify=GEMMA,
    ),
    Fault(
        name="scores_by_the_wrong_root",
        file="jaxpar/model/attention.py",
        old="q = q * math.sqrt(a.head_dim / a.scale_dim)",
        new="q = q * math.sqrt(a.scale_dim / a.head_dim)",
        certify="gemma_2/27b tensor=2",
    ),
    Fault(
        name="query_scale_without_steps",
        file="jaxpar/model/rope.py",
        old="turns = (positions // s.original_max_position).astype(jnp.float32)",
        new="turns = positions.astype(jnp.float32) / s.original_max_position",
        certify="ministral_3_8b data=2,tensor=2",
    ),
    Fault(
        name="query_growth_one_position_late",
        file="jaxpar/model/rope.py",
        old="turns = ((positions + 1) // growth.span).astype(jnp.float32)",
        new="turns = (positions // growth.span).astype(jnp.float32)",
        certify="llama4_scout expert=2,data=2",
    ),
    Fault(
        name="yarn_ramp_turned_around",
        file="jaxpar/model/rope.py",
        old="return frequencies * (1 - ramp + ramp / s.factor)",
        new="return frequencies * (ramp + (1 - ramp) / s.factor)",
        certify="deepseek_v3 expert=2,data=2",
    ),
    Fault(
        name="latent_scores_without_their_factor",
        file="jaxpar/model/latent_attention.py",
        old="return q if factor == 1 else q * factor",
        new="return q if factor == 1 else q * factor**0.5",
        certify="deepseek_v3 expert=2,data=2",
    ),
    Fault(
        name="output_bias_of_every_tensor_rank",
        file="jaxpar/model/layer.py",
        old='out = linear.add_bias(out, vectors.get(self.bias or ""))',
        new='bias = vectors.get(self.bias or "")\n'
        "        bias = None if bias is None else bias * lax.axis_size('tensor')\n"
        "        out = linear.add_bias(out, bias)",
        certify="gpt_oss_20b expert=2,tensor=2",
    ),
    Fault(
        name="norm_of_the_wrong_group",
        file="jaxpar/model/recurrent/mamba.py",
        old="groups = out.reshape(*out.shape[:2], a.num_groups // lax.axis_size(TENSOR), -1)",
        new="groups = out.reshape(*out.shape[:2], 1, -1)",
        certify="nemotron_h_8b tensor=2",
    ),
    Fault(
        name="adapters_factor_twice",
        file="jaxpar/model/lora.py",
        old="return out | {n: factor * a for n, a in b.items()}",
        new="return out | {n: factor**2 * a for n, a in b.items()}",
        certify="llama_1b_lora_chat data=2,tensor=2",
    ),
    Fault(
        name="decode_positions_one_ahead",
        file=DECODE,
        old="return first[:, None] + jnp.arange(count, dtype=jnp.int32)",
        new="return first[:, None] + jnp.arange(1, count + 1, dtype=jnp.int32)",
        certify=TENSOR,
        tests=(GREEDY,),
    ),
    Fault(
        name="cache_written_one_slot_late",
        file=HELD,
        old="lax.dynamic_update_slice_in_dim(row, part, at, 0)",
        new="lax.dynamic_update_slice_in_dim(row, part, at + (len(part) == 1), 0)",
        certify=TENSOR,
        tests=(GREEDY,),
    ),
    Fault(
        name="cache_without_windows",
        file=HELD,
        old="        kv_positions=slots,\n",
        new="        kv_positions=slots,\n        window=None,\n",
        certify=BIASED,
        tests=(GREEDY,),
    ),
    Fault(
        name="convolution_forgets_its_latest_token",
        file=HELD,
        old="return jnp.concatenate((held.tail[:, 1:], mixed), axis=1)",
        new="return jnp.concatenate((mixed, held.tail[:, :-1]), axis=1)",
        certify=HYBRID,
        tests=(GREEDY,),
    ),
    Fault(
        name="prompts_tail_one_token_early",
        file=HELD,
        old="places = lengths[:, None] - (width - 1) + jnp.arange(width - 1)",
        new="places = lengths[:, None] - width + jnp.arange(width - 1)",
        certify=HYBRID,
        tests=(GREEDY,),
    ),
    Fault(
        name="padding_changes_the_state",
        file=HELD,
        old="there = positions < lengths[:, None]",
        new="there = positions <= lengths[:, None]",
        certify=HYBRID,
        tests=(GREEDY,),
    ),
    Fault(
        name="decoded_logits_without_their_cap",
        file=DECODE,
        old="softcapped(lax.all_gather(local, TENSOR, axis=1, tiled=True), m.logits_softcap)",
        new="lax.all_gather(local, TENSOR, axis=1, tiled=True)",
        certify=GEMMA,
        tests=("tests/inference/test_generation.py",),
    ),
    Fault(
        name="absorbed_scores_by_the_wider_head",
        file="jaxpar/model/latent_attention.py",
        old="    q *= math.sqrt(q.shape[-1] / a.head_dim)",
        new="    q *= 1.0",
        certify="deepseek_v2_lite tensor=2",
        tests=(
            "tests/inference/test_generation.py"
            "::test_angles_of_longrope_are_those_of_a_text_so_far",
        ),
    ),
    Fault(
        name="rows_share_their_random_numbers",
        file=GENERATION,
        old="jax.random.fold_in(jax.random.fold_in(root, n), p)",
        new="jax.random.fold_in(jax.random.fold_in(root, 0 * n), p)",
        certify=TENSOR,
        tests=("tests/inference/test_generation.py",),
    ),
    Fault(
        name="top_p_leaves_out_the_last_token",
        file=GENERATION,
        old="likely = jnp.where(before < how.top_p, likely, -jnp.inf)",
        new="likely = jnp.where(before + of_likely <= how.top_p, likely, -jnp.inf)",
        certify=TENSOR,
        tests=("tests/inference/test_generation.py::test_temperature_top_k_and_top_p",),
    ),
    Fault(
        name="exported_layers_by_place_in_their_stack",
        file=LAYOUT,
        old='index["L"] = entry.layers[index["L"]]',
        new='index["L"] = index["L"] + 0',
        certify="deepseek_v2_lite tensor=2",
        tests=(EVERY_VALUE, GOLDENS),
    ),
    Fault(
        name="exported_head_not_transposed",
        file=NAMES,
        old='_TOP = {"embed": "a b", "positions": "a b", "head": "b a"}',
        new='_TOP = {"embed": "a b", "positions": "a b", "head": "a b"}',
        certify=TENSOR,
        tests=(GOLDENS,),
    ),
    Fault(
        name="exported_gate_and_up_swapped",
        file=SHARED,
        old='    **{f"w_{n}": f"mlp.{n}_proj.weight" for n in _PARTS},\n',
        new='    **{f"w_{n}": f"mlp.{o}_proj.weight" '
        'for n, o in zip(_PARTS, ("up", "gate", "down"))},\n',
        certify=TENSOR,
        tests=(GOLDENS,),
    ),
    Fault(
        name="exported_norms_swapped",
        file=SHARED,
        old="""    "attn_norm": "input_layernorm.weight",
    "attn_norm_bias": "input_layernorm.bias",
    "mlp_norm": "post_attention_layernorm.weight",""",
        new="""    "attn_norm": "post_attention_layernorm.weight",
    "attn_norm_bias": "input_layernorm.bias",
    "mlp_norm": "input_layernorm.weight",""",
        certify=TENSOR,
        tests=(GOLDENS,),
    ),
    Fault(
        name="interleaved_gate_and_up_swapped",
        file=LAYOUT,
        old="return (entry.part if int(dim) > 1 else 0) if dim.isdigit() else slice(None)",
        new="return (1 - entry.part if int(dim) > 1 else 0) if dim.isdigit() else slice(None)",
        certify=BIASED,
        tests=(GOLDENS,),
    ),
    Fault(
        name="exported_mup_without_its_factors",
        file="jaxpar/convert/hf/exporting.py",
        old="cfg = dataclasses.replace(cfg, model=standard(cfg.model))\n    if dtype",
        new="plain = dataclasses.replace(cfg.model, mup=None)\n"
        "    cfg = dataclasses.replace(cfg, model=plain)\n    if dtype",
        certify="llama3_8b data=2,tensor=2 --model.mup.base-width 32",
        tests=("tests/convert/test_export.py::test_mup_is_written_as_granites_factors",),
    ),
    Fault(
        name="merged_adapters_without_alpha",
        file="jaxpar/model/lora.py",
        old="merged[name] += factor * product(blocks[name + A], blocks[name + B])",
        new="merged[name] += product(blocks[name + A], blocks[name + B])",
        certify="llama_1b_lora_chat data=2,tensor=2",
        tests=("tests/meshes/test_lora.py::test_merged_weights_compute_the_same",),
    ),
    Fault(
        name="drafts_are_accepted_by_the_models_chance_alone",
        file="jaxpar/inference/speculative.py",
        old="accepted = uniform * of_drafts(proposed) < of_drafts(target[:, :-1])",
        new="accepted = uniform < of_drafts(target[:, :-1])",
        certify=TENSOR,
    ),
    Fault(
        name="tokens_after_a_rejected_draft_by_all_chances",
        file="jaxpar/inference/speculative.py",
        old="return jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, p)",
        new="return jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 1, rest, p)",
        certify=TENSOR,
    ),
)
