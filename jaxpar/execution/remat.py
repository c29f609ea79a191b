"""Rematerialization: which named values are saved for the backward pass.

Policies are allow-lists of names. A block-list would keep alive the unnamed copy of every gathered
weight. `remat_policies.REMAT_POLICIES` lists the names that each policy saves. H, G and F count one
tensor rank's part. Only latent attention has latents: Rq, Rkv and R are model.q_lora_rank,
kv_lora_rank and qk_rope_head_dim. Its qkv has 2 H (2 K - R + I) bytes, its qk 4 H K, and its
attn_out 2 H I, with I for v_head_dim.

    name            value                                     per token and layer, bf16 bytes
    layer_input     residual stream before attention          2 D / tensor
    attn_norm       normalized input of attention, gathered   2 D
    latents         latents of this rank's tokens, and key    2 (Rq + Rkv + R) / tensor
    latent_norms    the same, normalized and gathered         2 (Rq + Rkv + R)
    qkv             projections, before norm and RoPE         2 (H + 2G) K
    qk              queries and keys after RoPE               2 (H + G) K
    attn_out        attention output                          2 H K
    attn_lse        its log-sum-exp, float32                  4 H
    attn_residual   residual stream after attention           2 D / tensor
    mlp_norm        normalized input of the MLP, gathered     2 D
    gate_up         gate and up projections                   4 F
    mlp_hidden      silu(gate) * up                           2 F
    moe_tokens      what experts receive of an expert axis    2 D for each token or row
    moe_weights     matrices of experts as a layer uses them  6 D F E/n per layer, not per token

A name with the suffix `:host` is saved in pinned host memory: copied there in the forward, and back
in the backward (`parallel/host_offload.py`). On a mesh without stages, the last unrolled layer
keeps its values on the device, because its backward comes right after its forward. layer_input, a
layer's only input, is saved under every policy; it has a name so that it can be saved on the host.

With `Execution.norm` of deferred_scale, attn_norm and mlp_norm are saved before their rows are
scaled.

With `compute.matmul_dtype` float8 and one scale per tensor, the rounded input of a matmul has the
name of the input. attn_norm, mlp_norm and mlp_hidden are then saved in rounded form, which takes
half the bytes. attn_out is saved in both forms, because attention's own backward needs it: 3 H K.

Every policy also saves the scale of each row of a norm, 4 bytes, and which experts a token has,
with the router's weights as they arrive: with k = `experts_per_token`, 16 k bytes, on an
expert axis of n devices 4 (1 + s + 3 n) k with dispatch by tokens and 4 (5 + 4 s) k by rows, for
s = `parallel.expert_slack`, without padding. With experts, gate_up takes 4 k F.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.config.remat_policies import (
    EXPERT_NAMES,
    LAYER_INPUT,
    ON_HOST,
    REMAT_NAMES,
    without_mark,
)
from jaxpar.kernels import float8, norm
from jaxpar.kernels.float8.rounding import WithAmax


def named[X: jax.Array | WithAmax](x: X, name: str) -> X:
    """Name a value so that a policy can save it. For a `WithAmax`, name its array."""
    assert name in REMAT_NAMES + EXPERT_NAMES, name
    if isinstance(x, WithAmax):
        return dataclasses.replace(x, values=checkpoint_name(x.values, name))
    return checkpoint_name(x, name)


#: Remat name of the integers that say which tokens each expert has, and of the router's weights as
#: they arrive. Every policy saves them: they are small, and a choice that is recomputed could
#: differ in its last bit.
PLAN = "moe_plan"


def named_plan[T](plan: T) -> T:
    """Name every array of a tree as `PLAN`."""
    return jax.tree.map(lambda a: checkpoint_name(a, PLAN), plan)


def all_on_device(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of `saved_names` with every value on the device instead of on the host."""
    return tuple(name for name in map(without_mark, names) if name != LAYER_INPUT)


def rematerialize(
    fn: Callable[..., Any], names: Sequence[str], *, apart: bool
) -> Callable[..., Any]:
    """Return `fn` with a backward that recomputes everything except the named values.

    Args:     fn: its first argument is the layer's input. names: as returned by `saved_names`.
              apart: whether the backward reads the saved values from a loop's carry. XLA then
              cannot undo the recomputation, and the barrier that prevents this elsewhere would only
              block fusions.
    """
    on_device = [name for name in names if not name.endswith(ON_HOST)]
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(*on_device, float8.SCALE, norm.SCALE, PLAN),
        names_which_can_be_offloaded=tuple(without_mark(n) for n in names if n.endswith(ON_HOST)),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def from_named_input(x: jax.Array, *rest: Any) -> Any:
        return fn(checkpoint_name(x, LAYER_INPUT), *rest)

    return jax.checkpoint(from_named_input, policy=policy, prevent_cse=not apart)
