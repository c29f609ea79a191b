"""A layer on several groups of rows: one group communicates while another computes.

Source:   Wang et al. 2024 (2409.15241), Domino: the split of the batch.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.execution.decisions import Execution
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.layer import Weights, branches_with_weights
from jaxpar.parallel.gradient_buffers import buffers_of_use


def layer_of_row_groups(
    xs: tuple[jax.Array, ...], w: Weights, contexts: tuple[AttentionContext, ...], ex: Execution
) -> tuple[jax.Array, ...]:
    """`layer` on groups of rows: the communication of one over TENSOR overlaps another's matmuls.

    All groups pass through one branch, then all through the next. A barrier makes what a turn
    receives arrive by the end of the turn before, so it travels meanwhile. The backward runs the
    turns, under the same rule, in reverse.

    Args:     xs: [B/groups, T/(sequence*tensor), D] each. contexts: of each.
    Returns:  as xs.
    """
    rows, outs, groups = list(xs), list[Any](), range(len(xs))
    turns = list(itertools.product(branches_with_weights(w, ex.cfg.model), groups))

    def finish(k: int) -> None:
        (branch, vectors, _), i = turns[k]
        with jax.named_scope(branch.name):
            rows[i] = branch.add(rows[i], branch.send(outs.pop(0)), vectors, ex.cfg.model)

    def start(k: int) -> Any:
        (branch, vectors, matrices), i = turns[k]
        if k >= len(groups):
            finish(k - len(groups))
        with jax.named_scope(branch.name):
            rows[i], h = branch.normalize(rows[i], vectors, ex)
            return branch.receive(h, matrices, branch.norm, ex)

    h = start(0)
    for k, ((branch, _, matrices), i) in enumerate(turns):
        with jax.named_scope(branch.name):
            out = branch.compute(h, buffers_of_use(matrices, i), contexts[i], ex)
        if k + 1 < len(turns):
            h, out = lax.optimization_barrier((start(k + 1), out))
        outs.append(out)
    for k in range(len(turns) - len(groups), len(turns)):
        finish(k)
    return tuple(rows)


def in_groups(tree: Any, groups: int) -> tuple[Any, ...]:
    """Arrays of [B, ...], cut into groups of rows."""
    cut = lambda i: jax.tree.map(lambda a: jnp.split(a, groups)[i], tree)  # noqa: E731
    return tuple(cut(i) for i in range(groups)) if groups > 1 else (tree,)
