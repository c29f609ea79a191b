"""Rematerialization: what the backward pass finds saved, by name.

Policies are allow-lists of names. A block-list would keep alive the unnamed twin of every gathered
weight. `remat_policies.REMAT_POLICIES` says which names each policy saves. H, G and F are one
tensor rank's part.

    name            value                                     per token and layer, bf16 bytes
    layer_input     residual stream before attention          2 D / tensor
    attn_norm       normalized input of attention, gathered   2 D
    qkv             projections, before norm and RoPE         2 (H + 2G) K
    qk              queries and keys after RoPE               2 (H + G) K
    attn_out        attention output                          2 H K
    attn_lse        its log-sum-exp, float32                  4 H
    attn_residual   residual stream after attention           2 D / tensor
    mlp_norm        normalized input of the MLP, gathered     2 D
    gate_up         gate and up projections                   4 F
    mlp_hidden      silu(gate) * up                           2 F

A name with `:host` after it is saved in pinned host memory: copied there in the forward, and back
in the backward (`parallel/host_offload.py`). Values of an unrolled layer whose backward comes right
after its forward, the last one of a mesh without stages, stay on the device. layer_input, a layer's
only input, is saved under every policy, so it is named only to be saved there.

attn_norm and mlp_norm are saved before their rows are scaled, where that comes after the matmul
(`Execution.norm`).

Under `model.matmul_dtype` float8 and one scale per tensor, the rounded input of a matmul goes by
the name of the input. attn_norm, mlp_norm and mlp_hidden are then saved in its place, in half of
the bytes; attn_out beside it, which attention's own backward needs: 3 H K.

Saved under every policy: the scale of each row of a norm, 4 bytes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.config.remat_policies import LAYER_INPUT, ON_HOST, REMAT_NAMES, without_mark
from jaxpar.kernels import float8, norm
from jaxpar.kernels.float8.amax import WithAmax


def named[X: jax.Array | WithAmax](x: X, name: str) -> X:
    """Let a policy save this value under its name; of one `WithAmax`, the array."""
    assert name in REMAT_NAMES, name
    if isinstance(x, WithAmax):
        return dataclasses.replace(x, values=checkpoint_name(x.values, name))
    return checkpoint_name(x, name)


def all_on_device(names: Sequence[str]) -> tuple[str, ...]:
    """The same values of `saved_names`, none of them in host memory."""
    return tuple(name for name in map(without_mark, names) if name != LAYER_INPUT)


def rematerialize(
    fn: Callable[..., Any], names: Sequence[str], *, apart: bool
) -> Callable[..., Any]:
    """`fn`, whose backward recomputes all but the values of these names.

    Args:     fn: its first argument is the layer's input. names: as `saved_names` gives them.
              apart: the backward finds what was saved in a loop's carry, so XLA cannot undo the
              recomputation; the barrier that would keep it from doing so would only hold up
              fusions.
    """
    on_device = [name for name in names if not name.endswith(ON_HOST)]
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(*on_device, float8.SCALE, norm.SCALE),
        names_which_can_be_offloaded=tuple(without_mark(n) for n in names if n.endswith(ON_HOST)),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def from_named_input(x: jax.Array, *rest: Any) -> Any:
        return fn(checkpoint_name(x, LAYER_INPUT), *rest)

    return jax.checkpoint(from_named_input, policy=policy, prevent_cse=not apart)
