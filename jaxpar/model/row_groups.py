"""A layer's branches on groups of rows that take turns: one communicates, another computes.

Source:   Wang et al. 2024 (2409.15241), Domino: the split of the batch.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.execution.decisions import Execution
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.layer import Branch, Weights, branches
from jaxpar.parallel.gradient_buffers import buffers_of_use


def layer_in_turns(
    xs: tuple[jax.Array, ...], w: Weights, contexts: tuple[AttentionContext, ...], ex: Execution
) -> tuple[jax.Array, ...]:
    """`layer` on groups of rows, one's communication over TENSOR beside another's computation.

    All groups take their turn in a branch, then all in the next. What a turn needs must be there
    when the turn before it ends, so it is on its way meanwhile; the backward runs the turns, and
    the same rule, in reverse.

    Args:     xs: [B/groups, T/(sequence*tensor), D] each. contexts: of each.
    Returns:  as xs.
    """
    rows, outs, groups = list(xs), list[Any](), range(len(xs))
    turns = list(itertools.product(branches(ex.cfg.model), groups))

    def finish(branch: Branch, i: int) -> None:
        with jax.named_scope(branch.name):
            rows[i] = branch.leave(rows[i], outs.pop(0), branch.own(w), ex)

    def start(k: int) -> Any:
        branch, i = turns[k]
        if k >= len(groups):
            finish(turns[k - len(groups)][0], i)
        with jax.named_scope(branch.name):
            rows[i], h = branch.enter(rows[i], branch.own(w), ex)
            return h

    h = start(0)
    for k, (branch, i) in enumerate(turns):
        with jax.named_scope(branch.name):
            out = branch.compute(h, buffers_of_use(branch.own(w), i), contexts[i], ex)
        if k + 1 < len(turns):
            h, out = lax.optimization_barrier((start(k + 1), out))
        outs.append(out)
    for i in groups:
        finish(branch, i)
    return tuple(rows)


def in_groups(tree: Any, groups: int) -> tuple[Any, ...]:
    """Arrays of [B, ...], cut into groups of rows."""
    cut = lambda i: jax.tree.map(lambda a: jnp.split(a, groups)[i], tree)  # noqa: E731
    return tuple(cut(i) for i in range(groups)) if groups > 1 else (tree,)
