"""Rematerialisation: what the backward pass finds saved, by name.

Policies are allow-lists of names. A block-list would keep alive the unnamed twin of every gathered
weight. `validation.REMAT_POLICIES` says which names each policy saves.

    name            value                                     per token and layer, bf16 bytes
    attn_norm       normalised input of attention, gathered   2 D
    qkv             projections, before norm and RoPE         2 (H + 2G) K
    qk              queries and keys after RoPE               2 (H + G) K
    attn_out        attention output                          2 H K
    attn_lse        its log-sum-exp, float32                  4 H
    attn_residual   residual stream after attention           2 D / tensor
    mlp_norm        normalised input of the MLP, gathered     2 D
    gate_up         gate and up projections                   4 F
    mlp_hidden      silu(gate) * up                           2 F
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.validation import REMAT_NAMES, REMAT_POLICIES


def named(x: jax.Array, name: str) -> jax.Array:
    """Let a policy save this value under its name."""
    assert name in REMAT_NAMES, name
    return checkpoint_name(x, name)


def saved_names(remat: str) -> tuple[str, ...]:
    """The names that `parallel.remat` saves."""
    return REMAT_POLICIES.get(remat, tuple(remat.split(",")))


def rematerialize(fn: Callable[..., Any], remat: str, *, in_scan: bool) -> Callable[..., Any]:
    """`fn`, whose backward recomputes all but the named values that `remat` saves.

    Args:     in_scan: the call sits in a scan body, where XLA cannot undo the recomputation and
              needs no barrier against it.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*saved_names(remat))
    return jax.checkpoint(fn, policy=policy, prevent_cse=not in_scan)
