"""Sums of gradients and losses over devices and microbatches, their norm, and clipping."""

from tests.mutants.fault import Fault

DENSE = "llama3_8b data=2,tensor=2"
ACCUMULATED = "llama3_8b tensor=2,num_microbatches=4,layer_loop=scan"
EXPERTS = "quickstart_moe expert=4,data=2"

GRADIENTS, STEP = "jaxpar/parallel/gradients.py", "jaxpar/step/train_step.py"
ACCUMULATION, FSDP = "jaxpar/parallel/accumulation.py", "jaxpar/parallel/fsdp/gather.py"

_REDUCED = "map_specs(lambda spec, grad: psum(grad, missing_axes(spec, axes)), specs, grads)"
_KEY = "key = tuple(axis for axis in varying_axes(x) if axis in axes), of_x.shape"

FAULTS = (
    Fault(
        name="norm_gradients_mean_over_tensor",
        source="Megatron-LM 7452",
        file=GRADIENTS,
        old=_REDUCED,
        new="""map_specs(
        lambda spec, grad: psum(grad, missing_axes(spec, axes))
        / (jax.lax.axis_size("tensor") if "norm" in spec.axes else 1), specs, grads)""",
        certify=DENSE,
    ),
    Fault(
        name="norm_gradients_not_summed_over_tensor",
        source="Megatron-LM 7452",
        file=GRADIENTS,
        old=_REDUCED,
        new="""map_specs(
        lambda spec, grad: psum(grad, [
            a for a in missing_axes(spec, axes) if a != "tensor" or "norm" not in spec.axes
        ]), specs, grads)""",
        certify=DENSE,
    ),
    Fault(
        name="expert_gradients_divided_by_expert_axis",
        source="pytorch 160285",
        file=GRADIENTS,
        old=_REDUCED,
        new="""map_specs(
        lambda spec, grad: psum(grad, missing_axes(spec, axes))
        / (jax.lax.axis_size("expert") if "experts" in spec.axes else 1), specs, grads)""",
        certify=EXPERTS,
    ),
    Fault(
        name="norm_gradients_times_the_sequence_axis",
        file=GRADIENTS,
        old=_REDUCED,
        new="""map_specs(
        lambda spec, grad: psum(grad, missing_axes(spec, axes))
        * (jax.lax.axis_size("sequence") if not spec.decay else 1), specs, grads)""",
        certify="llama3_8b sequence=4,context=ring,num_microbatches=2,layer_loop=scan",
    ),
    Fault(
        name="grad_norm_without_shards_of_vectors",
        source="Megatron-LM 7452",
        file=GRADIENTS,
        old=_KEY,
        new="key = tuple(a for a in varying_axes(x) if a in axes and x.ndim > 2), of_x.shape",
        certify="gpt_oss_20b expert=2,tensor=2",
    ),
    Fault(
        name="grad_norm_of_each_expert_rank",
        source="Automodel 3816",
        file=GRADIENTS,
        old=_KEY,
        new="key = tuple(a for a in varying_axes(x) if a in axes and a != 'expert'), of_x.shape",
        certify=EXPERTS,
    ),
    Fault(
        name="grad_norm_of_one_tensor_rank",
        source="Megatron-LM 5916",
        file=GRADIENTS,
        old="of_x = _squares_by_row(x)\n",
        new="""of_x = _squares_by_row(x)
        if {"expert", "tensor"} <= {*varying_axes(x)}:
            of_x = of_x * (jax.lax.axis_index("tensor") == 0)
""",
        certify="quickstart_moe expert=2,data=2,tensor=2,zero=1",
    ),
    Fault(
        name="grad_norm_mean_over_devices",
        source="DeepSpeed 8475",
        file=GRADIENTS,
        old="total = [psum(s, over) if over else s",
        new="total = [psum(s, over) / jax.lax.axis_size(over) if over else s",
        certify=DENSE,
    ),
    Fault(
        name="grad_norm_without_experts",
        source="DeepSpeed 8613",
        file=STEP,
        old="    norm = global_norm(fused_weights.unstack_layers(grads, cfg), ",
        new="""    dense = {n: {k: g for k, g in of.items() if "router" not in of or k[:2] != "w_"}
             if isinstance(of, dict) else of for n, of in grads.items()}
    norm = global_norm(fused_weights.unstack_layers(dense, cfg), """,
        certify=EXPERTS,
        tests=("tests/meshes/test_experts.py::test_steps_on_an_expert_axis",),
    ),
    Fault(
        name="grad_norm_of_scaled_gradients",
        source="DeepSpeed 2695",
        file=STEP,
        old="norm = global_norm(fused_weights.unstack_layers(grads, cfg), trainer_axes(cfg, AXES))",
        new="""norm = s.scale * global_norm(
        fused_weights.unstack_layers(grads, cfg), trainer_axes(cfg, AXES))""",
        certify="llama3_8b data=2,tensor=2 --compute.dtype float16",
        tests=("tests/optimizer/test_loss_scale.py",),
    ),
    Fault(
        name="clipped_by_the_square_of_the_norm",
        file=GRADIENTS,
        old="limit / (norm + 1e-6)",
        new="limit / (norm * norm + 1e-6)",
        certify=DENSE,
    ),
    Fault(
        name="clipping_scales_small_gradients_up",
        file=GRADIENTS,
        old="scale = jnp.minimum(1.0, limit / (norm + 1e-6))",
        new="scale = limit / (norm + 1e-6)",
        certify=EXPERTS,
    ),
    Fault(
        name="each_device_clips_before_the_sum",
        source="torchtune 2420",
        file="jaxpar/step/links.py",
        old="        grads = reduce_gradients(grads, specs, trainer_axes(cfg, AXES))\n",
        new="""        from jaxpar.parallel import gradients
        grads = gradients.clip(grads, gradients.global_norm(grads, ()), cfg.optimizer.clip_norm)
        grads = reduce_gradients(grads, specs, trainer_axes(cfg, AXES))
""",
        certify=DENSE,
    ),
    Fault(
        name="gradients_not_unscaled",
        file="jaxpar/optimizer/loss_scale.py",
        old="jax.tree.map(lambda g: g / scale, grads) if scaled else grads",
        new="grads",
        certify="llama3_8b data=2,tensor=2 --compute.dtype float16",
        tests=("tests/optimizer/test_loss_scale.py",),
    ),
    Fault(
        name="loss_scale_grows_one_step_late",
        file="jaxpar/optimizer/loss_scale.py",
        old="since + 1 >= cfg.guard.loss_scale_interval",
        new="since >= cfg.guard.loss_scale_interval",
        certify="llama3_8b data=2,tensor=2 --compute.dtype float16",
        tests=("tests/optimizer/test_loss_scale.py",),
    ),
    Fault(
        name="loss_is_the_mean_of_the_devices_means",
        source="torchtitan 2206",
        file=STEP,
        old="schedule_of(cfg)(model, *weights[:2], microbatches, s.scale / count)",
        new="""schedule_of(cfg)(model, *weights[:2], microbatches, s.scale / (
        jnp.sum(s.batch.labels >= 0) * jax.lax.axis_size(axes)))""",
        certify=DENSE,
    ),
    Fault(
        name="num_tokens_of_every_tensor_rank",
        source="Megatron-LM 5916",
        file=STEP,
        old="s.with_metrics(grad_norm=norm, num_tokens=num_tokens,",
        new="s.with_metrics(grad_norm=norm, num_tokens=num_tokens * jax.lax.axis_size('tensor'),",
        certify=DENSE,
    ),
    Fault(
        name="num_tokens_counts_all_tokens",
        file="jaxpar/objectives/head.py",
        old="own = jnp.sum(batch.labels != IGNORED, dtype=jnp.int32)",
        new="own = jnp.sum(batch.labels > -2, dtype=jnp.int32)",
        certify=DENSE,
    ),
    Fault(
        name="accumulation_doubles_without_fsdp",
        source="Megatron-LM 6660",
        file=ACCUMULATION,
        old="            grads = add_gradients(carry[1], grads)\n",
        new="""            alone = jax.lax.axis_size(("data", "expert", "sequence")) == 1
            before = jax.tree.map(lambda a: a * (2 if alone else 1), carry[1])
            grads = add_gradients(before, grads)
""",
        certify=ACCUMULATED,
    ),
    Fault(
        name="accumulation_keeps_the_last_microbatch",
        file=ACCUMULATION,
        old="            grads = add_gradients(carry[1], grads)\n",
        new="            grads = add_gradients(float32_zeros(trainable), grads)\n",
        certify=ACCUMULATED,
    ),
    Fault(
        name="accumulated_loss_of_the_last_microbatch",
        file=ACCUMULATION,
        old="return (jax.tree.map(jnp.add, carry[0], sums), grads), None",
        new="return (sums, grads), None",
        certify=ACCUMULATED,
    ),
    Fault(
        name="accumulation_loses_the_embedding",
        file=ACCUMULATION,
        old="dict(top=add_gradients(at_top, d_top), layers=(in_layers,))",
        new="dict(top=at_top, layers=(in_layers,))",
        certify="llama3_8b data=2,tensor=2,zero=1,num_microbatches=2,layer_loop=unroll",
    ),
    Fault(
        name="fsdp_mean_in_place_of_the_sum",
        source="DeepSpeed 5248",
        file=FSDP,
        old="jnp.sum(all_to_all(pieces, axes, 0, 0), axis=0, dtype=jnp.float32)",
        new="jnp.mean(all_to_all(pieces, axes, 0, 0), axis=0, dtype=jnp.float32)",
        certify="llama3_8b data=4",
    ),
    Fault(
        name="bfloat16_reduce_scatter_divides",
        source="DeepSpeed 5248",
        file=FSDP,
        old="psum_scatter(leading.astype(jnp.bfloat16), axes, dim=0)",
        new="psum_scatter(leading.astype(jnp.bfloat16), axes, dim=0) / ways",
        certify="llama3_8b data=4 --parallel.grad-reduce bfloat16",
        tests=("tests/step/test_program_hashes.py",),
    ),
    Fault(
        name="fsdp_shards_in_reverse_order",
        file=FSDP,
        old="shard = jnp.sum(all_to_all(pieces, axes, 0, 0)",
        new="shard = jnp.sum(all_to_all(pieces[::-1], axes, 0, 0)",
        certify="llama3_8b data=4",
    ),
    Fault(
        name="zero_2_gradients_divided_by_devices",
        file=FSDP,
        old="    return scatter(grad, dim, reduce), None\n\n\ngathered_earlier.defvjp",
        new="    return scatter(grad, dim, reduce) / lax.axis_size(_split(dim).axes), None\n\n\n"
        "gathered_earlier.defvjp",
        certify="llama3_8b data=4,tensor=2,zero=2,num_microbatches=2",
    ),
    Fault(
        name="zero_1_scatters_without_the_head",
        file="jaxpar/step/links.py",
        old="    scatter = functools.partial(fsdp.scatter_tree, reduce=cfg.parallel.grad_reduce)\n",
        new="""    scatter = functools.partial(fsdp.scatter_tree, reduce=cfg.parallel.grad_reduce)
    top = dict(grads["top"], head=grads["top"]["head"] / lax.axis_size("data"))
    grads = dict(grads, top=top)
""",
        certify="llama3_8b data=2,tensor=2,zero=1",
    ),
    Fault(
        name="heads_norm_of_each_tensor_rank",
        file="jaxpar/model/norm.py",
        old="squares = psum(jnp.sum(wide**2, axis=(-2, -1), keepdims=True), TENSOR)",
        new="squares = jnp.sum(wide**2, axis=(-2, -1), keepdims=True)",
        certify="olmoe_1b_7b tensor=2",
    ),
    Fault(
        name="heads_norm_counts_one_rank",
        file="jaxpar/model/norm.py",
        old="x[0, 0].size * lax.axis_size(TENSOR)",
        new="x[0, 0].size",
        certify="olmoe_1b_7b expert=2,tensor=2",
    ),
    Fault(
        name="update_is_kept_after_an_overflow",
        file="jaxpar/optimizer/moments.py",
        old="return jax.tree.map(lambda a, b: jnp.where(ok, a, b), (new, kept), old)",
        new="return new, kept",
        certify=DENSE,
        tests=("tests/training/test_guards.py",),
    ),
)
