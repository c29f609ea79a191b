"""Sums in a dtype that is too small, and numbers that are rounded alike in every step."""

from tests.mutants.fault import Fault

DENSE = "llama3_8b data=2,tensor=2"
ACCUMULATED = "llama3_8b data=2,num_microbatches=4"

FAULTS = (
    Fault(
        name="microbatches_add_up_in_the_compute_dtype",
        file="jaxpar/parallel/gradient_buffers.py",
        old="total = gradient.astype(jnp.float32) + total",
        new="total = (gradient + total.astype(gradient.dtype)).astype(jnp.float32)",
        certify=ACCUMULATED,
    ),
    Fault(
        name="embedding_adds_up_equal_tokens_in_the_compute_dtype",
        file="jaxpar/model/embedding.py",
        old='d_table = zeros.at[place].add(d_rows.astype(jnp.float32), mode="drop")',
        new='d_table = zeros.astype(d_rows.dtype).at[place].add(d_rows, mode="drop")',
        certify=DENSE,
    ),
    Fault(
        name="fsdp_sums_in_the_dtype_that_is_sent",
        file="jaxpar/parallel/fsdp/gather.py",
        old="axis=0, dtype=jnp.float32)",
        new="axis=0)",
        certify="llama3_8b data=4",
    ),
    Fault(
        name="chunks_of_the_loss_add_up_in_the_compute_dtype",
        file="jaxpar/model/loss.py",
        old="return _add(carry, (sums, d_head)), d_h",
        new="d_head = (carry[1].astype(h.dtype) + d_head.astype(h.dtype)).astype(jnp.float32)\n"
        "        return (_add(carry[0], sums), d_head), d_h",
        certify=DENSE,
    ),
    Fault(
        name="stages_add_up_in_the_compute_dtype",
        file="jaxpar/parallel/pipeline/slots.py",
        old='top=add_gradients(carry["grads"]["top"], d_top))\n        return jax.tree.map',
        new="top=jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32),\n"
        '                     add_gradients(carry["grads"]["top"], d_top)))\n'
        "        return jax.tree.map",
        certify="llama3_8b pipeline=2,num_microbatches=8",
    ),
    Fault(
        name="average_is_rounded_alike_in_every_step",
        file="jaxpar/step/features/moving_average.py",
        old="key = hash_uint32(hash_uint32(seed) + step.astype(jnp.uint32))",
        new="key = hash_uint32(hash_uint32(seed) + (0 * step).astype(jnp.uint32))",
        certify=f"{DENSE} --optimizer.ema.decay 0.99 --optimizer.ema.dtype bfloat16",
    ),
    Fault(
        name="errors_of_skipped_steps_are_kept",
        file="jaxpar/step/features/compression.py",
        old="s.if_ok(s.results[self.name], s.extra[self.name])",
        new="s.results[self.name]",
        certify="llama3_8b replica=2,data=2 --parallel.replica 2 --parallel.replica-reduction int8",
    ),
    Fault(
        name="errors_are_those_of_scaled_gradients",
        file="jaxpar/step/features/compression.py",
        old="grads = loss_scale.unscale_gradients(grads, s.scale, scaled=s.ex.scales_loss)",
        new="sums, kept = reduce_compressed(\n"
        "            grads, s.extra.get(self.name, ()), specs, s.cfg.parallel)\n"
        "        return loss_scale.unscale_gradients("
        "sums, s.scale, scaled=s.ex.scales_loss), kept",
        certify="llama3_8b replica=2,data=2 --parallel.replica 2 --parallel.replica-reduction int8",
    ),
    Fault(
        name="overflow_quarters_the_loss_scale",
        file="jaxpar/optimizer/loss_scale.py",
        old="jnp.maximum(scale / 2, 1.0)",
        new="jnp.maximum(scale / 4, 1.0)",
        certify=DENSE,
    ),
    Fault(
        name="average_follows_skipped_updates",
        file="jaxpar/step/features/moving_average.py",
        old="return jnp.where(ok, new, old)",
        new="return new",
        certify=DENSE,
    ),
)
