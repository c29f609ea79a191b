"""Update rules, moments and their rounding, decay, schedules, averages, replicas of DiLoCo."""

from tests.mutants.fault import Fault

DENSE = "llama3_8b data=2,tensor=2"
MUON = "llama3_8b data=2,tensor=2 --optimizer.name muon"
ADAFACTOR = "llama3_8b data=2,tensor=2 --optimizer.name adafactor"
BFLOAT16 = "llama3_8b data=2,tensor=2 --optimizer.second-moment-dtype bfloat16"
EIGHT_BITS = "llama3_8b data=2,tensor=2 --optimizer.second-moment-dtype 8bit"
AVERAGE = "llama3_8b data=2,tensor=2 --optimizer.ema.decay 0.9"
MUP = "llama3_8b data=2,tensor=2 --model.mup.base-width 32"
DILOCO = "llama3_8b replica=2,data=2 --parallel.replica 2 --diloco.every 2"
WARM = "llama3_8b data=2,tensor=2 --optimizer.warmup-steps 3"

RULES, MOMENTS = "jaxpar/optimizer/rules.py", "jaxpar/optimizer/moments.py"
MUON_FILE, FACTORED = "jaxpar/optimizer/muon.py", "jaxpar/optimizer/adafactor.py"
SCHEDULES, EMA = "jaxpar/optimizer/schedules.py", "jaxpar/step/features/moving_average.py"
ROUNDING, BLOCKS = "jaxpar/optimizer/stochastic_rounding.py", "jaxpar/optimizer/blockwise.py"

_TEST = "tests/optimizer/test_"

FAULTS = (
    Fault(
        name="muon_orthogonalizes_shards",
        source="Megatron-LM 6099",
        file="jaxpar/optimizer/matrices.py",
        old="layout = layout_of(specs[name], arrays[name].shape, sharded=self.sharded)",
        new="layout = layout_of(specs[name], arrays[name].shape, sharded=False)",
        certify=MUON,
    ),
    Fault(
        name="muon_puts_shards_in_the_wrong_dim",
        file="jaxpar/parallel/matrices.py",
        old="order += [*map(layout.axes.index, axes), first + 1 + dim]",
        new="order += [first + 1 + dim, *map(layout.axes.index, axes)]",
        certify=MUON,
    ),
    Fault(
        name="muon_scaled_by_the_smaller_side",
        file=MUON_FILE,
        old="of_base = ADAMW_RMS * math.sqrt(max(rows, columns))",
        new="of_base = ADAMW_RMS * math.sqrt(min(rows, columns))",
        certify=MUON,
        tests=(f"{_TEST}muon.py::test_sizes_of_updates",),
    ),
    Fault(
        name="muon_without_nesterov",
        file=MUON_FILE,
        old="averaged = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)",
        new="averaged = ahead",
        certify=MUON,
        tests=(f"{_TEST}muon.py::test_one_device_computes_the_updates_of_optax",),
    ),
    Fault(
        name="adafactor_means_count_one_shard",
        file=FACTORED,
        old="math.prod(x.shape[dim] for dim in dims) * math.prod(map(lax.axis_size, axes))",
        new="math.prod(x.shape[dim] for dim in dims)",
        certify=ADAFACTOR,
    ),
    Fault(
        name="adafactor_decay_one_step_late",
        file=FACTORED,
        old="1 - count.astype(jnp.float32) ** DECAY",
        new="1 - (count.astype(jnp.float32) + 1) ** DECAY",
        certify=ADAFACTOR,
        tests=(f"{_TEST}adafactor.py::test_one_device_computes_the_updates_of_optax",),
    ),
    Fault(
        name="adamw_betas_swapped",
        file="jaxpar/optimizer/widths.py",
        old="plain = optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.eps)",
        new="plain = optax.scale_by_adam(cfg.beta2, cfg.beta1, cfg.eps)",
        certify=DENSE,
        tests=(f"{_TEST}optimizer.py::test_adamw_takes_its_textbook_step",),
    ),
    Fault(
        name="decay_of_every_parameter",
        file=RULES,
        old="decay = optax.add_decayed_weights(cfg.weight_decay, mask=mask)",
        new="decay = optax.add_decayed_weights(cfg.weight_decay)",
        certify=DENSE,
        tests=(f"{_TEST}optimizer.py::test_without_a_gradient_only_the_matrices_shrink",),
    ),
    Fault(
        name="decay_without_the_embedding",
        file="jaxpar/sharding/params.py",
        old="return map_specs(lambda spec: spec.decay, specs)",
        new="return map_specs(lambda spec: spec.decay and spec.columns > 0, specs)",
        certify=DENSE,
        tests=(f"{_TEST}optimizer.py::test_without_a_gradient_only_the_matrices_shrink",),
    ),
    Fault(
        name="decay_of_experts_biases",
        file="jaxpar/components/experts.py",
        old='found["b_down"] = vector((E, D), ("every_expert", "norm"))',
        new='found["b_down"] = vector((E, D), ("every_expert", "norm"), decay=True)',
        certify="gpt_oss_20b expert=2,data=2",
        tests=(f"{_TEST}optimizer.py::test_biases_of_experts_do_not_decay",),
    ),
    Fault(
        name="decay_not_times_the_rate",
        file=RULES,
        old="return optax.chain(direction, decay, optax.scale_by_learning_rate(rate))",
        new="return optax.chain(direction, optax.scale_by_learning_rate(rate),\n"
        "        optax.add_decayed_weights(-cfg.weight_decay * cfg.learning_rate, mask=mask))",
        certify=WARM,
        tests=(f"{_TEST}optimizer.py::test_adamw_takes_its_textbook_step",),
    ),
    Fault(
        name="warm_up_begins_at_zero",
        file=SCHEDULES,
        old="rising = optax.linear_schedule(peak / first_steps, peak, max(first_steps - 1, 1))",
        new="rising = optax.linear_schedule(0.0, peak, first_steps)",
        certify=WARM,
        tests=(f"{_TEST}optimizer.py::test_warm_up_rises_evenly_to_the_peak_and_wastes_no_step",),
    ),
    Fault(
        name="decay_counts_the_warm_up",
        file=SCHEDULES,
        old="decay = cfg.decay_steps or after",
        new="decay = cfg.decay_steps or num_steps",
        certify=WARM,
        tests=(f"{_TEST}optimizer.py::test_the_rate_never_rises_again_and_ends_at_its_floor",),
    ),
    Fault(
        name="table_of_rates_one_step_ahead",
        file="jaxpar/optimizer/schedules.py",
        old="return lambda count: rates[jnp.minimum(count, len(rates) - 1)]",
        new="return lambda count: rates[jnp.minimum(count + 1, len(rates) - 1)]",
        certify=WARM,
        tests=(f"{_TEST}rate_table.py::test_steps_are_the_same_with_and_without",),
    ),
    Fault(
        name="average_of_the_weights_before",
        file=EMA,
        old='s.extra["ema"], s.trainable, s.step',
        new='s.extra["ema"], s.old, s.step',
        certify=AVERAGE,
        tests=(f"{_TEST}moving_average.py::test_a_step_averages_the_weights_that_it_makes",),
    ),
    Fault(
        name="average_warms_up_one_step_late",
        file=EMA,
        old="t = (step + 1).astype(jnp.float32)",
        new="t = step.astype(jnp.float32)",
        certify=AVERAGE,
        tests=(f"{_TEST}moving_average.py::test_the_decay_warms_up",),
    ),
    Fault(
        name="average_weighs_new_weights_by_its_decay",
        file=EMA,
        old="new = before + (1 - keep) * (param - before)",
        new="new = param + (1 - keep) * (before - param)",
        certify=AVERAGE,
        tests=(f"{_TEST}moving_average.py",),
    ),
    Fault(
        name="rounding_truncates",
        file=ROUNDING,
        old="upper = (raw + (bits & jnp.uint32(0xFFFF))) >> 16",
        new="upper = raw >> 16",
        certify=BFLOAT16,
        tests=(f"{_TEST}stochastic_rounding.py",),
    ),
    Fault(
        name="rounding_by_places_in_the_shard",
        file=ROUNDING,
        old="place = places(shape[dim], spec[dim]).astype(jnp.uint32)",
        new="place = places(shape[dim], None).astype(jnp.uint32)",
        certify=BFLOAT16,
        tests=(f"{_TEST}stochastic_rounding.py::test_the_mesh_has_no_say_in_the_numbers",),
    ),
    Fault(
        name="rounding_by_rows_of_the_shard",
        file=MOMENTS,
        old="return places(len(param), spec.partition_spec[0])",
        new="return places(len(param), None)",
        certify=BFLOAT16,
        tests=(f"{_TEST}moments.py::test_every_mesh_rounds_alike",),
    ),
    Fault(
        name="rounding_repeats_in_every_step",
        file=MOMENTS,
        old="key = hash_uint32(hash_uint32(seed) + step.astype(jnp.uint32))",
        new="key = hash_uint32(hash_uint32(seed) + (0 * step).astype(jnp.uint32))",
        certify=BFLOAT16,
        tests=(f"{_TEST}moments.py", f"{_TEST}stochastic_rounding.py"),
    ),
    Fault(
        name="second_moments_in_signed_8_bits",
        file=MOMENTS,
        old='return DynamicCode(signed=field == "first_moment_dtype")',
        new="return DynamicCode(signed=True)",
        certify=EIGHT_BITS,
        tests=(f"{_TEST}blockwise.py",),
    ),
    Fault(
        name="moments_in_8_bits_with_scales_of_the_step_before",
        file=MOMENTS,
        old="return quantize(leaf, blocks_in(old), code_of(field), scale)",
        new='return quantize(leaf, blocks_in(old), code_of(field), old["scales"])',
        certify=EIGHT_BITS,
        tests=(f"{_TEST}blockwise.py",),
    ),
    Fault(
        name="blocks_scaled_by_their_mean",
        file=BLOCKS,
        old="return jnp.max(jnp.abs(_divide(x, blocks)), axis=blocks.dim + 1)",
        new="return jnp.mean(jnp.abs(_divide(x, blocks)), axis=blocks.dim + 1)",
        certify=EIGHT_BITS,
        tests=(f"{_TEST}blockwise.py",),
    ),
    Fault(
        name="mup_rate_by_outputs",
        file="jaxpar/optimizer/widths.py",
        old="factors = map_specs(lambda spec: 1 / spec.widths[0], specs)",
        new="factors = map_specs(lambda spec: 1 / spec.widths[1], specs)",
        certify=MUP,
        tests=(f"{_TEST}widths.py",),
    ),
    Fault(
        name="mup_initial_weights_by_inputs",
        file="jaxpar/model/mup.py",
        old="std=spec.std / math.sqrt(rows), widths=(rows, columns)",
        new="std=spec.std / rows, widths=(rows, columns)",
        certify=MUP,
        tests=("tests/model/test_mup.py::test_widths_and_initial_weights",),
    ),
    Fault(
        name="mup_logits_by_the_root_of_the_width",
        file="jaxpar/model/transformer.py",
        old="return h if m.logits_divisor == 1 else h * (1 / m.logits_divisor)",
        new="return h if m.logits_divisor == 1 else h * m.logits_divisor**-0.5",
        certify=MUP,
    ),
    Fault(
        name="qk_clip_by_one_tensor_rank",
        file="jaxpar/step/features/qk_clip.py",
        old="logits = lax.pmax(jnp.max(here, axis=-2), TOKEN_AXES)",
        new="logits = lax.pmax(jnp.mean(here, axis=-2), TOKEN_AXES)",
        certify=f"{MUON} --optimizer.qk-clip 0.5",
    ),
    Fault(
        name="qk_clip_squares_the_factor_of_queries",
        file="jaxpar/step/features/qk_clip.py",
        old="of_query = (eta.reshape(L, G, H // G) / of_key[:, :, None]).reshape(L, H)",
        new="of_query = eta",
        certify=f"{MUON} --optimizer.qk-clip 0.5",
    ),
    Fault(
        name="diloco_sums_replicas",
        file="jaxpar/step/diloco/fragments.py",
        old="return psum(x, REPLICA) / n",
        new="return psum(x, REPLICA)",
        certify=DILOCO,
        tests=("tests/meshes/test_diloco.py::test_plain_trainers",),
    ),
    Fault(
        name="diloco_without_nesterov",
        file="jaxpar/step/diloco/fragments.py",
        old="outer - d.outer_learning_rate * (gradient + d.outer_momentum * momentum), momentum",
        new="outer - d.outer_learning_rate * momentum, momentum",
        certify=DILOCO,
        tests=("tests/meshes/test_diloco.py::test_plain_trainers",),
    ),
    Fault(
        name="compressed_sums_forget_their_errors",
        file="jaxpar/parallel/replicas/reduction.py",
        old="sums[name], rest = sum_int8(here)",
        new="sums[name], rest = sum_int8(here)[0], 0 * here",
        certify="llama3_8b replica=2,data=2 --parallel.replica 2 --parallel.replica-reduction int8",
        tests=("tests/parallel/test_replicas.py::test_sums_and_errors_are_those_of_whole_arrays",),
    ),
    Fault(
        name="float8_scales_of_each_device",
        file="jaxpar/parallel/fsdp/gather.py",
        old="whole = restore(pmax(numbers, FSDP_AXES))",
        new="whole = restore(varying(numbers))",
        certify="llama3_8b data=4 --compute.matmul-dtype float8",
        tests=("tests/meshes/test_float8.py::test_gradients_are_those_of_one_device",),
    ),
)
