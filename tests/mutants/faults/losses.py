"""Cross entropy over a sharded vocabulary, z-loss, caps, multi-token prediction, pairs."""

from tests.mutants.fault import Fault

TENSOR = "llama3_8b data=2,tensor=2"
LOSS, MODULE = "jaxpar/model/loss.py", "jaxpar/model/mtp/module.py"
TRANSFORMER, EMBEDDING = "jaxpar/model/transformer.py", "jaxpar/model/embedding.py"

FAULTS = (
    Fault(
        name="chunked_loss_sums_over_the_vocabulary_again",
        source="torchtitan 3412",
        file=LOSS,
        old="return _scaled(d_h, g * scale), (g * d_head)",
        new="d_h = varying(psum(d_h, VOCAB_AXES)) if n > 1 else d_h\n"
        "    return _scaled(d_h, g * scale), (g * d_head)",
        certify="llama3_8b tensor=2,loss_chunks=2",
        tests=("tests/model/test_loss.py::test_chunks_add_up",),
    ),
    Fault(
        name="loss_counts_ignored_labels",
        file=LOSS,
        old="weight = jnp.where(labels_N == IGNORED, 0.0, 1.0)",
        new="weight = jnp.where(labels_N == IGNORED - 1, 0.0, 1.0)",
        certify=TENSOR,
    ),
    Fault(
        name="z_loss_gradient_halved",
        file=LOSS,
        old="slope = 1 + 2 * z_loss * lse_N",
        new="slope = 1 + z_loss * lse_N",
        certify="llama3_8b data=2,tensor=2 --train.z-loss 1e-3",
    ),
    Fault(
        name="z_loss_divided_by_microbatches",
        source="Megatron-LM 5047",
        file=TRANSFORMER,
        old="return token_loss(top, x, batch.labels, cfg, weights.z_loss)",
        new="return token_loss(\n"
        "        top, x, batch.labels, cfg, weights.z_loss / cfg.parallel.num_microbatches)",
        certify="llama3_8b data=2,num_microbatches=2 --train.z-loss 1e-4",
    ),
    Fault(
        name="softmax_base_of_one_rank",
        file=LOSS,
        old="psum((own_sum * jnp.exp(own_base - base), own_logit), VOCAB_AXES)",
        new="psum((own_sum, own_logit), VOCAB_AXES)",
        certify=TENSOR,
    ),
    Fault(
        name="label_at_the_edge_of_a_shard_is_on_two_ranks",
        file=LOSS,
        old="held = (local >= 0) & (local < V)",
        new="held = (local >= 0) & (local <= V)",
        certify=TENSOR,
    ),
    Fault(
        name="row_at_the_edge_of_a_shard_is_on_two_ranks",
        file=EMBEDDING,
        old="""    held = (local >= 0) & (local < num_rows)
    rows = table_VD""",
        new="""    held = (local >= 0) & (local <= num_rows)
    rows = table_VD""",
        certify=TENSOR,
    ),
    Fault(
        name="embedding_gradient_keeps_one_of_equal_tokens",
        file=EMBEDDING,
        old="zeros.at[place].add(d_rows",
        new="zeros.at[place].set(d_rows",
        certify=TENSOR,
    ),
    Fault(
        name="logits_cap_slope_not_squared",
        file=LOSS,
        old="slope = 1 - jnp.square(logits_NV.astype(jnp.float32) / softcap)",
        new="slope = 1 - jnp.abs(logits_NV.astype(jnp.float32) / softcap)",
        certify="gemma_2/2b data=2,tensor=2",
    ),
    Fault(
        name="attention_cap_slope_not_squared",
        file="jaxpar/kernels/attention/reference.py",
        old="slope = 1 - jnp.square(scores / softcap)",
        new="slope = 1 - jnp.square(scores) / softcap",
        certify="gemma_2/2b data=2,sequence=2,context=ring",
    ),
    Fault(
        name="mtp_loss_by_its_own_label_count",
        source="Megatron-LM 7452",
        file=TRANSFORMER,
        old="        total += mtp_loss / m.mtp_depth * more\n",
        new="""        share = batch.labels.size / jnp.sum(batch.labels >= 0)
        total += mtp_loss / m.mtp_depth * more * share
""",
        certify="deepseek_v3 expert=2,data=2 --model.mtp-depth 1",
    ),
    Fault(
        name="mtp_successor_by_place_with_zigzag",
        source="Megatron-LM 7452",
        file=MODULE,
        old="places, n = jnp.asarray(_successors(order, T)), lax.axis_size(SEQUENCE)",
        new="places, n = jnp.asarray(_successors(None, T)), lax.axis_size(SEQUENCE)",
        certify="deepseek_v3 expert=2,sequence=2 --model.mtp-depth 1",
    ),
    Fault(
        name="mtp_labels_across_documents",
        file=MODULE,
        old="same = (take(batch.segment_ids) == batch.segment_ids) & (places >= 0)",
        new="same = jnp.broadcast_to(places >= 0, batch.segment_ids.shape)",
        certify="deepseek_v3 expert=2,data=2 --model.mtp-depth 1",
    ),
    Fault(
        name="mtp_router_losses_on_every_stage",
        source="Megatron-LM 1585",
        file="jaxpar/model/attention_context.py",
        old="    return with_loss_weight(contexts, weight * (lax.axis_index(PIPELINE) == 0))\n",
        new="    return contexts\n",
        certify="deepseek_v3 expert=2,pipeline=2,num_microbatches=2 --model.mtp-depth 1",
    ),
    Fault(
        name="pairs_count_on_every_sequence_rank",
        file="jaxpar/objectives/pairs.py",
        old="counted = here & (lax.axis_index(SEQUENCE) == 0)",
        new="counted = here & (lax.axis_index(SEQUENCE) >= 0)",
        certify="llama_1b_dpo sequence=2,tensor=2",
    ),
    Fault(
        name="pairs_with_rewards_of_prompts",
        file="jaxpar/objectives/of_pairs.py",
        old="scores = jnp.where(mb.labels == IGNORED, 0.0, scores - mb.extra[REFERENCE])",
        new="scores = jnp.where(mb.labels == IGNORED, 0.0, scores) - mb.extra[REFERENCE] / 2",
        certify="llama_1b_dpo data=2,tensor=2",
    ),
)
