"""Pipeline stages: microbatches, chunks, stashes, directions, and where layers are."""

from tests.mutants.fault import Fault

TWO = "llama3_8b pipeline=2,num_microbatches=4"
FOUR = "llama3_8b pipeline=4,num_microbatches=4"
CHUNKS = "llama3_8b pipeline=2,virtual_stages=2,num_microbatches=4"
BUBBLE = "llama3_8b pipeline=4,num_microbatches=8,schedule=zero_bubble,zero=1,layer_loop=unroll"

SLOTS, RUNNER = "jaxpar/parallel/pipeline/slots.py", "jaxpar/parallel/pipeline/runner.py"
SCHEDULES, ORDER = "jaxpar/parallel/pipeline/schedules.py", "jaxpar/step/layer_order.py"
STAGES = "jaxpar/parallel/collectives.py"

FAULTS = (
    Fault(
        name="head_divided_by_microbatches_again",
        source="torchtitan 1733",
        file=SLOTS,
        old="d_top, dy = vjp(seed(sums, step.scale))",
        new="d_top, dy = vjp(seed(sums, step.scale / schedule.microbatches))",
        certify=TWO,
    ),
    Fault(
        name="head_keeps_the_last_microbatch",
        source="Automodel 3530",
        file=SLOTS,
        old='top=add_gradients(carry["grads"]["top"], d_top))\n        return jax.tree.map',
        new='top=add_gradients(float32_zeros(carry["grads"]["top"]), d_top))\n'
        "        return jax.tree.map",
        certify=TWO,
    ),
    Fault(
        name="head_reads_the_next_microbatch",
        file=SLOTS,
        old="""        mb = take(step.microbatches, m)
        trainable""",
        new="""        mb = take(step.microbatches, (m + 1) % schedule.microbatches)
        trainable""",
        certify=TWO,
    ),
    Fault(
        name="embedding_backward_of_the_microbatch_before",
        file=SLOTS,
        old="""        mb = take(step.microbatches, m)
        _, vjp""",
        new="""        mb = take(step.microbatches, jnp.maximum(m - 1, 0))
        _, vjp""",
        certify=TWO,
    ),
    Fault(
        name="stages_mask_the_microbatch_that_enters",
        file=SLOTS,
        old="context = model.context(take(step.microbatches, m))\n\n    def",
        new="context = model.context(take(step.microbatches, m0))\n\n    def",
        certify=TWO,
    ),
    Fault(
        name="stash_one_slot_too_small",
        file=SCHEDULES,
        old="return 2 * self.virtual * self.stages - 1",
        new="return 2 * self.virtual * self.stages - 2",
        certify=TWO,
    ),
    Fault(
        name="gradients_go_forward",
        file=RUNNER,
        old='carry["g"] = to_stage(dx, -1)',
        new='carry["g"] = to_stage(dx, 1)',
        certify=FOUR,
    ),
    Fault(
        name="chunks_backward_in_forward_order",
        file=SCHEDULES,
        old="chunk = self.virtual - 1 - chunk",
        new="chunk = chunk + 0",
        certify=CHUNKS,
    ),
    Fault(
        name="chunks_placed_by_stage",
        file=ORDER,
        old="begins = (np.cumsum(table.T) - table.T.ravel()).reshape(table.T.shape).T",
        new="begins = (np.cumsum(table) - table.ravel()).reshape(table.shape)",
        certify=CHUNKS,
    ),
    Fault(
        name="moments_stay_in_the_order_of_the_mesh",
        file="jaxpar/step/state.py",
        old="return x if order is None else convert(x, order)",
        new="""if "opt_state" in jax.tree_util.keystr(path):
            return x
        return x if order is None else convert(x, order)""",
        certify=CHUNKS,
        tests=("tests/checkpoint/test_checkpoint.py", "tests/meshes/test_chunks.py"),
    ),
    Fault(
        name="gpipe_outputs_one_slot_off",
        file="jaxpar/parallel/pipeline/gpipe.py",
        old="slot = (t - (step.schedule.stages - 1)) % step.schedule.num_actions",
        new="slot = (t - step.schedule.stages) % step.schedule.num_actions",
        certify="llama3_8b pipeline=2,num_microbatches=4,schedule=gpipe",
    ),
    Fault(
        name="zero_bubble_catches_up_half",
        file=SCHEDULES,
        old="return beside_forwards + 2 * after_backwards",
        new="return beside_forwards + after_backwards",
        certify=BUBBLE,
    ),
    Fault(
        name="zero_bubble_postpones_one_too_many",
        file=SCHEDULES,
        old="return self.stages - 1 + s",
        new="return self.stages + s",
        certify=BUBBLE,
    ),
    Fault(
        name="first_stage_output_is_broadcast",
        file=STAGES,
        old="own = jnp.where(lax.axis_index(PIPELINE) == n - 1, x, 0)",
        new="own = jnp.where(lax.axis_index(PIPELINE) == n - 2, x, 0)",
        certify=TWO,
    ),
    Fault(
        name="embedding_not_summed_over_stages",
        file=STAGES,
        old="return x if lax.axis_size(PIPELINE) == 1 else varying(psum(x, PIPELINE))",
        new="return x",
        certify=TWO,
    ),
    Fault(
        name="evaluation_reads_labels_of_the_microbatch_that_enters",
        file=RUNNER,
        old="sums = model.head(step.top, y, take(microbatches, m))",
        new="entering, _ = schedule.forward_action(jnp.clip(t, 0, schedule.num_actions - 1))\n"
        "            sums = model.head(step.top, y, take(microbatches, entering))",
        certify=TWO,
    ),
    Fault(
        name="evaluation_adds_the_loss_of_every_chunk",
        file=RUNNER,
        old="ready = (done >= 0) & (done < schedule.num_actions) & (c == virtual - 1)",
        new="ready = (done >= 0) & (done < schedule.num_actions)",
        certify=CHUNKS,
    ),
    Fault(
        name="unequal_stages_use_the_slots_of_the_first",
        file=ORDER,
        old="here = jnp.asarray(sizes, jnp.int32)[lax.axis_index(PIPELINE)]",
        new="here = jnp.asarray(sizes, jnp.int32)[0 * lax.axis_index(PIPELINE)]",
        certify="llama3_8b pipeline=2,num_microbatches=4,layers_per_stage=1,3",
    ),
)
