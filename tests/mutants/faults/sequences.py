"""Sequences over devices: rings, all-to-alls, documents, positions, recurrent states; TENSOR."""

from tests.mutants.fault import Fault

RING = "llama3_8b sequence=4,context=ring,num_microbatches=2,layer_loop=scan"
ULYSSES = "llama3_8b sequence=4,context=ulysses"
TENSOR = "llama3_8b data=2,tensor=4,zero=2,num_microbatches=2,layer_loop=unroll,row_groups=2"
HYBRID = "quickstart_hybrid sequence=4"
MAMBA = "nemotron_h_8b sequence=4"

CONTEXT, MASKS = "jaxpar/parallel/context.py", "jaxpar/model/attention_context.py"
PERMUTES, BETWEEN = "jaxpar/parallel/tensor/permutes.py", "jaxpar/parallel/recurrence.py"
CONVOLUTION = "jaxpar/model/recurrent/convolution.py"
STATE_SPACE = "jaxpar/model/recurrent/mamba.py"

FAULTS = (
    Fault(
        name="ring_masks_with_its_own_documents",
        file=CONTEXT,
        old="kv_positions=keys[2], kv_segments=keys[3])",
        new="kv_positions=keys[2], kv_segments=mask.kv_segments)",
        certify=RING,
    ),
    Fault(
        name="ring_masks_with_its_own_positions",
        file=CONTEXT,
        old="kv_positions=keys[2], kv_segments=keys[3])",
        new="kv_positions=mask.kv_positions, kv_segments=keys[3])",
        certify=RING,
    ),
    Fault(
        name="ring_gradients_one_device_short",
        file=CONTEXT,
        old="dk, dv = shift(d_keys, SEQUENCE, 1)",
        new="dk, dv = d_keys",
        certify=RING,
    ),
    Fault(
        name="ring_keys_turn_back_in_the_backward",
        file=CONTEXT,
        old="keys, d_keys = shift(keys, SEQUENCE, 1), shift(d_keys, SEQUENCE, 1)",
        new="keys, d_keys = shift(keys, SEQUENCE, -1), shift(d_keys, SEQUENCE, 1)",
        certify=RING,
    ),
    Fault(
        name="ring_merges_with_the_larger_sum",
        file=CONTEXT,
        old="lse = jnp.logaddexp(lse_a, lse_b)",
        new="lse = jnp.maximum(lse_a, lse_b)",
        certify=RING,
    ),
    Fault(
        name="ring_counts_sinks_in_every_part",
        file=CONTEXT,
        old="    out, lse = forward(q, k, v, mask, choice)\n    out = out.astype(jnp.float32)",
        new="    out, lse = add_sinks(*forward(q, k, v, mask, choice), sinks)\n"
        "    out = out.astype(jnp.float32)",
        certify="gpt_oss_20b sequence=2,context=ring",
    ),
    Fault(
        name="sinks_gradient_of_the_first_queries",
        file="jaxpar/kernels/attention/sinks.py",
        old="return -jnp.sum(weight * delta(out, d_out, d_lse), axis=(0, 2))",
        new="return -jnp.sum((weight * delta(out, d_out, d_lse))[:, :, 1:], axis=(0, 2))",
        certify="gpt_oss_20b expert=2,tensor=2",
    ),
    Fault(
        name="ulysses_repeats_key_heads_in_turn",
        file=CONTEXT,
        old="k, v = (jnp.repeat(x, repeat, axis=2) for x in (k, v))",
        new="k, v = (jnp.tile(x, (1, 1, repeat, 1)) for x in (k, v))",
        certify=ULYSSES,
    ),
    Fault(
        name="ulysses_takes_the_first_sinks",
        file=CONTEXT,
        old="sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(SEQUENCE) * heads, heads)",
        new="sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(SEQUENCE) * 0, heads)",
        certify="gpt_oss_20b sequence=2,context=ulysses",
    ),
    Fault(
        name="ulysses_masks_without_documents",
        file=CONTEXT,
        old="return replace(whole, q_positions=positions, q_segments=segments)",
        new="return replace(whole, q_positions=positions, q_segments=None, kv_segments=None)",
        certify=ULYSSES,
    ),
    Fault(
        name="window_one_token_wider",
        file="jaxpar/kernels/attention/mask.py",
        old="seen &= back < mask.window",
        new="seen &= back <= mask.window",
        certify="gpt_oss_20b expert=2,data=2",
    ),
    Fault(
        name="queries_do_not_see_themselves",
        file="jaxpar/kernels/attention/mask.py",
        old="seen = back >= 0",
        new="seen = back > 0",
        certify="llama3_8b data=2,tensor=2",
    ),
    Fault(
        name="documents_see_one_another",
        file=MASKS,
        old="        kv_segments=segments,\n        window=view.window,",
        new="        kv_segments=jnp.broadcast_to(batch.segment_ids[:, :1], segments.shape)\n"
        "        if segments is not None else None,\n        window=view.window,",
        certify="llama3_8b data=2,tensor=2",
    ),
    Fault(
        name="rope_by_place_with_zigzag",
        file=MASKS,
        old="tables = rope_tables(batch.positions, view.rope, view.dims, longest)",
        new="shape = batch.positions.shape\n"
        "        places = jnp.broadcast_to(jnp.arange(shape[1]), shape)\n"
        "        tables = rope_tables(places, view.rope, view.dims, longest)",
        certify=RING,
    ),
    Fault(
        name="rope_positions_start_at_1_on_later_devices",
        file=MASKS,
        old="tables = rope_tables(batch.positions, view.rope, view.dims, longest)",
        new="later = (lax.axis_index('sequence') > 0).astype(jnp.int32)\n"
        "        tables = rope_tables(batch.positions + later, view.rope, view.dims, longest)",
        certify="llama3_8b sequence=2",
    ),
    Fault(
        name="rope_of_neighbors_in_place_of_halves",
        file="jaxpar/model/rope.py",
        old='halves = layout == "halves"',
        new='halves = layout != "halves"',
        certify="llama3_8b data=2,tensor=2",
    ),
    Fault(
        name="recurrent_layers_in_zigzag_order",
        file=CONTEXT,
        old="or cfg.data.seq_len) if in_zigzag_order(cfg) else None",
        new="or cfg.data.seq_len)",
        certify=HYBRID,
    ),
    Fault(
        name="convolution_reads_the_next_shard",
        file=BETWEEN,
        old="return shift(x[:, x.shape[1] - count :], SEQUENCE, 1)",
        new="return shift(x[:, x.shape[1] - count :], SEQUENCE, -1)",
        certify=HYBRID,
    ),
    Fault(
        name="convolution_reads_the_start_of_the_shard_before",
        file=BETWEEN,
        old="return shift(x[:, x.shape[1] - count :], SEQUENCE, 1)",
        new="return shift(x[:, :count], SEQUENCE, 1)",
        certify=HYBRID,
    ),
    Fault(
        name="convolution_crosses_documents",
        file=CONVOLUTION,
        old="same_document = (positions >= back)[..., None]",
        new="same_document = (positions >= back - 1)[..., None]",
        certify="quickstart_hybrid data=2",
    ),
    Fault(
        name="state_counts_its_own_shard",
        file=BETWEEN,
        old="jnp.where(shard < here, a, b)",
        new="jnp.where(shard <= here, a, b)",
        certify=HYBRID,
    ),
    Fault(
        name="last_shard_misses_a_state",
        file=BETWEEN,
        old="for shard in range(n - 1):",
        new="for shard in range(min(n - 1, 2)):",
        certify=HYBRID,
    ),
    Fault(
        name="state_crosses_documents_between_shards",
        file=STATE_SPACE,
        old="kept = jnp.where(jnp.any(begins, axis=1)[:, None], 0.0, whole)[..., None, None]",
        new="kept = whole[..., None, None]",
        certify=MAMBA,
    ),
    Fault(
        name="state_decays_by_the_last_token_alone",
        file=STATE_SPACE,
        old="whole = jnp.exp(jnp.sum(log_decay, axis=1))",
        new="whole = jnp.exp(log_decay[:, -1])",
        certify=MAMBA,
    ),
    Fault(
        name="state_of_the_shard_before_is_added_not_multiplied",
        file="jaxpar/model/recurrent/delta_rule.py",
        old="return matrix @ state + added",
        new="return state + added",
        certify=HYBRID,
    ),
    Fault(
        name="state_survives_the_first_token_of_a_chunk",
        file="jaxpar/kernels/recurrence/chunks.py",
        old="since_start = jnp.where(document == 0, jnp.exp(sums.total), 0.0)",
        new="since_start = jnp.where(document <= 1, jnp.exp(sums.total), 0.0)",
        certify="quickstart_hybrid data=2",
    ),
    Fault(
        name="tensor_parts_return_the_wrong_way",
        file=PERMUTES,
        old="lax.ppermute(parts[step], axis, _ring(n, step))",
        new="lax.ppermute(parts[step], axis, _ring(n, -step))",
        certify=TENSOR,
    ),
    Fault(
        name="tensor_parts_in_reverse_order",
        file=PERMUTES,
        old="first = (n - lax.axis_index(axis)) % n * size",
        new="first = lax.axis_index(axis) % n * size",
        certify=TENSOR,
    ),
    Fault(
        name="tensor_split_in_reverse_order",
        file=PERMUTES,
        old="return tuple(shard(rank + step) for step in range(n))",
        new="return tuple(shard(rank - step) for step in range(n))",
        certify=TENSOR,
    ),
    Fault(
        name="tensor_sum_misses_the_last_part",
        file=PERMUTES,
        old="(part.astype(jnp.float32) for part in [parts[0], *sent])",
        new="(part.astype(jnp.float32) for part in [parts[0], *(sent[:-1] if n > 2 else sent)])",
        certify=TENSOR,
    ),
    Fault(
        name="row_groups_share_the_first_mask",
        file="jaxpar/model/row_groups.py",
        old="out = branch.compute(sent, buffers_of_use(matrices, i), contexts[i], ex)",
        new="out = branch.compute(sent, buffers_of_use(matrices, i), contexts[0], ex)",
        certify=TENSOR,
    ),
    Fault(
        name="gathered_keys_begin_one_device_late",
        file=PERMUTES,
        old="first = (n - lax.axis_index(axis)) % n * size",
        new="first = (n - lax.axis_index(axis) - (n > 2)) % n * size",
        certify="llama3_8b sequence=4,tensor=2",
    ),
)
