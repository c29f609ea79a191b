"""Rematerialisation: what the backward pass finds saved, by name.

Policies are allow-lists of names. A block-list would keep alive the unnamed twin of every gathered
weight. `memory_rules.REMAT_POLICIES` says which names each policy saves. H, G and F are one tensor
rank's part.

    name            value                                     per token and layer, bf16 bytes
    layer_input     residual stream before attention          2 D / tensor
    attn_norm       normalised input of attention, gathered   2 D
    qkv             projections, before norm and RoPE         2 (H + 2G) K
    qk              queries and keys after RoPE               2 (H + G) K
    attn_out        attention output                          2 H K
    attn_lse        its log-sum-exp, float32                  4 H
    attn_residual   residual stream after attention           2 D / tensor
    mlp_norm        normalised input of the MLP, gathered     2 D
    gate_up         gate and up projections                   4 F
    mlp_hidden      silu(gate) * up                           2 F

A name with `:host` after it is saved in pinned host memory: copied there in the forward, and back
in the backward (`parallel/offload.py`). layer_input, a layer's only input, is saved under every
policy, so it is named only to be saved there.

Under `model.matmul_dtype` float8 and one scale per tensor, the rounded input of a matmul goes by
the name of the input. attn_norm, mlp_norm and mlp_hidden are then saved in its place, in half of
the bytes; attn_out beside it, which attention's own backward needs: 3 H K.

Saved under every policy: the scale of each row of a norm, 4 bytes.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.kernels import float8
from jaxpar.memory_rules import LAYER_INPUT, ON_HOST, REMAT_NAMES, REMAT_POLICIES

#: Name of what every policy saves: too small to be worth the pass over memory that it takes.
NORM_SCALE = "norm_scale"


def named(x: jax.Array, name: str) -> jax.Array:
    """Let a policy save this value under its name."""
    assert name in REMAT_NAMES, name
    return checkpoint_name(x, name)


def saved_names(remat: str) -> tuple[str, ...]:
    """The names that `parallel.remat` saves, as it writes them."""
    return REMAT_POLICIES.get(remat, tuple(remat.split(",")))


def names_on_host(remat: str) -> tuple[str, ...]:
    """The names that `parallel.remat` saves in host memory."""
    names = saved_names(remat)
    return tuple(name.removesuffix(ON_HOST) for name in names if name.endswith(ON_HOST))


def rematerialize(fn: Callable[..., Any], remat: str, *, apart: bool) -> Callable[..., Any]:
    """`fn`, whose backward recomputes all but the named values that `remat` saves.

    Args:     fn: its first argument is the layer's input. apart: the backward finds what was saved
              in a loop's carry, so XLA cannot undo the recomputation; the barrier that would keep
              it from doing so would only hold up fusions.
    """
    on_device = [name for name in saved_names(remat) if not name.endswith(ON_HOST)]
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(*on_device, float8.SCALE, NORM_SCALE),
        names_which_can_be_offloaded=names_on_host(remat),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def from_named_input(x: jax.Array, *rest: Any) -> Any:
        return fn(checkpoint_name(x, LAYER_INPUT), *rest)

    return jax.checkpoint(from_named_input, policy=policy, prevent_cse=not apart)
