"""Routers, their losses and loads; dispatch, rounds, biases, shared experts."""

from tests.mutants.fault import Fault

FSDP = "quickstart_moe expert=4,data=2"
SLACK = "quickstart_moe expert=4,tensor=2,expert_slack=0.3"
ROWS = "quickstart_moe expert=4,data=2,expert_dispatch=rows,expert_slack=0.3"
TOKENS = "quickstart_moe expert=4,data=2,expert_dispatch=tokens,expert_slack=0.3"
SPREAD = "quickstart_moe expert=2,tensor=2,expert_tensor=1"
BIASED = "deepseek_v3 expert=2,sequence=2"

ROUTER, LOADS = "jaxpar/model/moe/router.py", "jaxpar/step/features/experts.py"
EXPERTS, PROBES = "jaxpar/model/moe/experts.py", "jaxpar/model/probes.py"
PLAN, TRAVEL = "jaxpar/parallel/expert/plan.py", "jaxpar/parallel/expert/rows.py"

_SUM = "total, *rest = psum(here, tuple(axis for axis in AXES if axis != PIPELINE))"

FAULTS = (
    Fault(
        name="router_bias_by_the_fullest_sequence_shard",
        source="torchtitan 4154",
        file=LOADS,
        old=_SUM,
        new="""axes = tuple(axis for axis in AXES if axis not in (PIPELINE, "sequence"))
    total, *rest = lax.pmax(psum(here, axes), "sequence")""",
        certify=BIASED,
    ),
    Fault(
        name="router_bias_by_each_shard",
        source="torchtitan 4154",
        file=LOADS,
        old=_SUM,
        new="""axes = tuple(axis for axis in AXES if axis not in (PIPELINE, "sequence", "tensor"))
    total, *rest = psum(here, axes)""",
        certify=BIASED,
    ),
    Fault(
        name="router_bias_by_the_first_layers_loads",
        file=LOADS,
        old="for stack, rows in _rows_by_stack(loads.rows, cfg).items():",
        new="first = jnp.broadcast_to(loads.rows[:1], loads.rows.shape)\n"
        "    for stack, rows in _rows_by_stack(first, cfg).items():",
        certify="deepseek_v3 expert=2,data=2",
        tests=("tests/meshes/test_experts.py::test_steps_on_an_expert_axis",),
    ),
    Fault(
        name="router_bias_rewards_full_experts",
        file=LOADS,
        old="jnp.sign(jnp.mean(rows, axis=1, keepdims=True) - rows)",
        new="jnp.sign(rows - jnp.mean(rows, axis=1, keepdims=True))",
        certify=BIASED,
    ),
    Fault(
        name="router_bias_changes_in_skipped_steps",
        file=LOADS,
        old="rate = jnp.where(ok, cfg.train.router_bias_rate, 0.0)",
        new="rate = jnp.float32(cfg.train.router_bias_rate)",
        certify=BIASED,
        tests=("tests/step/test_expert_loads.py", "tests/optimizer/test_loss_scale.py"),
    ),
    Fault(
        name="router_bias_weighs_the_outputs",
        file=ROUTER,
        old="weights = jnp.sum(one_hot * scores[..., None, :], axis=-1)",
        new="shown = scores + lax.stop_gradient(bias)\n"
        "    weights = jnp.sum(one_hot * shown[..., None, :], axis=-1)",
        certify=BIASED,
    ),
    Fault(
        name="router_weights_by_all_experts",
        file=ROUTER,
        old="weights /= jnp.sum(weights, axis=-1, keepdims=True)",
        new="weights /= jnp.sum(scores, axis=-1, keepdims=True)",
        certify=BIASED,
    ),
    Fault(
        name="router_scale_left_out",
        file=ROUTER,
        old="        weights *= r.scale\n",
        new="        weights *= 1.0\n",
        certify=BIASED,
    ),
    Fault(
        name="expert_groups_by_their_best_expert",
        file=ROUTER,
        old="lax.top_k(groups, min(2, groups.shape[-1]))",
        new="lax.top_k(groups, min(1, groups.shape[-1]))",
        certify=BIASED,
    ),
    Fault(
        name="router_gets_no_gradient_of_outputs",
        source="transformers 48687",
        file=EXPERTS,
        old="    to_experts, of_sums = x, weights\n",
        new="    to_experts, of_sums = x, 0 * weights + lax.stop_gradient(weights)\n",
        certify=FSDP,
    ),
    Fault(
        name="router_losses_of_every_tensor_rank",
        source="Megatron-LM 5047",
        file=PROBES,
        old="gradients = [once * weight for _, weight in adds]",
        new="gradients = [weight for _, weight in adds]",
        certify=SLACK,
    ),
    Fault(
        name="tallies_of_every_tensor_rank",
        source="torchtitan 4154",
        file=PROBES,
        old="_by_row(w[probe.key], value, context) if probe.by_row else once * value)",
        new="_by_row(w[probe.key], value, context) if probe.by_row else value)",
        certify=SLACK,
        tests=("tests/meshes/test_expert_metrics.py::test_loads_are_those_of_the_plain_model",),
    ),
    Fault(
        name="balance_over_the_batch_without_sequence",
        source="Megatron-LM 3768",
        file=ROUTER,
        old="jnp.sum(counts, 0, keepdims=True), B, TOKEN_AXES",
        new="jnp.sum(counts, 0, keepdims=True), B, TOKEN_AXES[:-1]",
        certify="quickstart_moe expert=2,sequence=2 --train.balance-over batch",
    ),
    Fault(
        name="balance_of_spread_experts_by_rank",
        source="Megatron-LM 7165",
        file=ROUTER,
        old="axes = (*axes, TENSOR) if spreads_experts(cfg.parallel) else axes",
        new="axes = (*axes,) if spreads_experts(cfg.parallel) else axes",
        certify=SPREAD,
    ),
    Fault(
        name="balance_loss_has_gradients_of_shares",
        file=ROUTER,
        old="    return of.num_experts * jnp.sum(share * jnp.sum(r.probabilities, axis=1), axis=1)",
        new="    return jnp.sum(share * jnp.sum(r.probabilities, axis=1), axis=1) * k",
        certify=FSDP,
    ),
    Fault(
        name="router_z_loss_not_squared",
        file=ROUTER,
        old="jnp.sum(r.log_partition**2, axis=1)",
        new="jnp.sum(r.log_partition, axis=1)",
        certify="quickstart_moe expert=4,data=2 --train.router-z-loss 1e-2",
    ),
    Fault(
        name="router_losses_of_every_microbatch",
        source="Megatron-LM 5047",
        file=ROUTER,
        old="everywhere = tokens.size * num_microbatches * lax.axis_size(TOKEN_AXES)",
        new="everywhere = tokens.size * lax.axis_size(TOKEN_AXES)",
        certify="quickstart_moe expert=2,data=2,replica=2,num_microbatches=2",
    ),
    Fault(
        name="balance_loss_metric_summed_over_layers",
        file=LOADS,
        old="means = psum(sums, PIPELINE) / len(stacks_of_experts(cfg.model))",
        new="means = psum(sums, PIPELINE)",
        certify=FSDP,
        tests=("tests/meshes/test_expert_metrics.py::test_loads_are_those_of_the_plain_model",),
    ),
    Fault(
        name="dispatch_drops_the_last_rounds_rows",
        file=TRAVEL,
        old="rounds=(jnp.max(lengths) + (C - 1)) // C,",
        new="rounds=jnp.max(lengths) // C,",
        certify=ROWS,
    ),
    Fault(
        name="dispatch_rounds_end_one_row_early",
        file=TRAVEL,
        old="here = (queues.places >= first) & (queues.places < first + C)",
        new="here = (queues.places >= first) & (queues.places < first + C - 1)",
        certify=ROWS,
    ),
    Fault(
        name="rows_of_a_token_by_the_device_of_its_expert",
        file=TRAVEL,
        old="arriving=lax.dynamic_index_in_dim(every, lax.axis_index(axes), 1, keepdims=False),",
        new="arriving=lax.dynamic_index_in_dim(every, lax.axis_index(axes), 0, keepdims=False),",
        certify=ROWS,
    ),
    Fault(
        name="buffer_drops_its_last_round",
        file=PLAN,
        old="add_rounds(of_number, first, (places.starts[-1] + (R - 1)) // R, most)",
        new="add_rounds(of_number, first, places.starts[-1] // R, most)",
        certify=TOKENS,
    ),
    Fault(
        name="rows_of_a_device_count_themselves_before",
        file=PLAN,
        old="comes_first = rank[:, None] > rank",
        new="comes_first = rank[:, None] >= rank",
        certify=TOKENS,
    ),
    Fault(
        name="down_bias_of_every_tensor_rank",
        file=EXPERTS,
        old="once = spreads_experts(ex.cfg.parallel) or lax.axis_index(TENSOR) == 0",
        new="once = True",
        certify="gpt_oss_20b expert=2,tensor=2",
    ),
    Fault(
        name="down_bias_without_the_routers_weights",
        file=EXPERTS,
        old="by_expert = jnp.sum(chosen * weights[..., None], axis=-2)",
        new="by_expert = jnp.sum(chosen, axis=-2) / weights.shape[-1]",
        certify="gpt_oss_20b expert=2,data=2",
    ),
    Fault(
        name="shared_experts_gate_left_out",
        file=EXPERTS,
        old="return out * _gate_of_shared(x, w[SHARED[3]]) if SHARED[3] in w else out",
        new="return out",
        certify="qwen3_next_80b_a3b expert=2,data=2",
    ),
    Fault(
        name="expert_gradients_of_the_first_round",
        file=EXPERTS,
        old="d_w = plan.in_rounds(of_weights, _of_weights(how, first, x, w, plan))",
        new="d_w = _of_weights(how, first, x, w, plan)",
        certify=ROWS,
    ),
    Fault(
        name="expert_biases_gate_and_up_swapped",
        file=EXPERTS,
        old="(d.d_inner[0], d.d_inner[-1])",
        new="(d.d_inner[-1], d.d_inner[0])",
        certify="gpt_oss_20b expert=2,data=2",
    ),
)
