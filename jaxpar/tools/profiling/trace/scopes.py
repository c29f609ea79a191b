"""Parses a kernel's op_name into its pass and named scope."""

import re
from typing import NamedTuple

from jaxpar.config.features import declarations

FORWARD, RECOMPUTE, BACKWARD, OUTSIDE = "forward", "recompute", "backward", "outside"
PASSES = (FORWARD, RECOMPUTE, BACKWARD, OUTSIDE)

#: Names that the model and the step use in `jax.named_scope`.
BLOCKS = (
    *("embedding", "attention", "feed_forward", "experts", "loss", "optimizer"),
    *("norm", "qkv", "rope", "core_attention", "output", "gate_up", "activation", "router"),
    *("plan", "permute", "down", "combine", "weight_gradients", "shared_experts"),
    *("adapters", "clip", "grad_norm", "gather_weights", "float8_scales", "scatter_gradients"),
    *("reduce_gradients", "between_stages", "exchange_matrices", "newton_schulz"),
    *("largest_logits", *(scope for one in declarations() for scope in one.scopes)),
)

#: Parts of a name that JAX adds for its own structure.
_STRUCTURE = frozenset(
    "shard_map checkpoint rematted_computation remat while body cond scan closed_call core_call "
    "eval_jaxpr custom_vjp_call custom_jvp_call custom_vjp_call_jaxpr pjit jit named_call".split()
)
#: A transformation around a part, whose argument is a name. In jit(silu) it is a function.
_TRANSFORMED = re.compile(r"(?:jvp|transpose|vmap|pmap)\((.*)\)$")


class Place(NamedTuple):
    """A pass and a scope.

    The pass is forward, recompute (rematerialization), backward, or outside of differentiation.
    """

    phase: str
    scope: str


def place_of(op_name: str) -> Place:
    """Return pass and named scopes of an op_name; the scope is "" if there is none.

    The scope has the nested names in BLOCKS, outermost first, or else the outermost name.
    jit(train_step)/shard_map/transpose(jvp(jvp()))/checkpoint/attention/norm/mul: backward,
    attention/norm.
    """
    if "rematted_computation" in op_name:
        phase = RECOMPUTE
    elif "transpose(" in op_name:
        phase = BACKWARD
    else:
        phase = FORWARD if "jvp(" in op_name else OUTSIDE
    parts = op_name.split("/")[:-1]  # the last is the primitive
    names = list(filter(None, map(_name, parts)))
    known = list(dict.fromkeys(name for name in names if name in BLOCKS))
    return Place(phase, "/".join(known or names[:1]))


def _name(part: str) -> str:
    """Return the name in a part; "" if JAX added the part."""
    while found := _TRANSFORMED.match(part):
        part = found[1]
    if "(" in part or part in _STRUCTURE or re.fullmatch(r"branch_\d+_fun", part):
        return ""
    return part


def shorten(op_name: str) -> str:
    """Return an op_name without the common prefix jit(NAME)/shard_map/."""
    return re.sub(r"^jit\([^)]*\)/(shard_map/)?", "", op_name)
