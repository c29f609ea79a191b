"""A layer on several row groups: one group communicates while another computes.

Source:   Wang et al. 2024 (2409.15241), Domino: the batch split.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.execution.decisions import Execution
from jaxpar.model import probes
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.layer import Weights, branches_with_weights
from jaxpar.parallel.gradient_buffers import buffers_of_use


def layer_of_row_groups(
    xs: tuple[jax.Array, ...], w: Weights, contexts: tuple[AttentionContext, ...], ex: Execution
) -> tuple[jax.Array, ...]:
    """Apply `layer` to row groups. One's communication over TENSOR and EXPERT overlaps
    another's matmuls.

    All groups pass through one branch, then all through the next. A turn is one group in one
    branch. A barrier makes each turn receive its input by the end of the previous turn, so that
    the communication overlaps that turn. The backward runs the turns in reverse, in the same way.

    Args:     xs: [B/groups, T/(sequence*tensor), D] each. contexts: one per group.
    Returns:  as xs.
    """
    rows, outs, groups, of_layer = list(xs), list[Any](), range(len(xs)), w
    branches = branches_with_weights(w, contexts[0].layer, ex.cfg.model)
    turns = list(itertools.product(branches, groups))

    def finish(k: int) -> None:
        (branch, vectors, _), i = turns[k]
        with jax.named_scope(branch.name):
            out = branch.send(branch.collect(outs.pop(0)))
            out = branch.normalized(out, vectors, ex.cfg.model)
            out = probes.observe(branch.output_point, out, of_layer, contexts[i], ex.cfg)
            rows[i] = branch.add(rows[i], out, vectors, ex.cfg.model)

    def start(k: int) -> Any:
        (branch, vectors, matrices), i = turns[k]
        if k >= len(groups):
            finish(k - len(groups))
        with jax.named_scope(branch.name):
            rows[i], h = branch.normalize(rows[i], vectors, ex)
            at = branch.input_point
            rows[i] = probes.observe(at, rows[i], of_layer, contexts[i], ex.cfg, seen=h.whole)
            w = buffers_of_use(matrices, i)
            h = branch.receive(h, w, branch.norm, contexts[i], ex)
            return branch.dispatch(h, w, contexts[i], ex)

    sent = start(0)
    for k, ((branch, _, matrices), i) in enumerate(turns):
        with jax.named_scope(branch.name):
            out = branch.compute(sent, buffers_of_use(matrices, i), contexts[i], ex)
        if k + 1 < len(turns):
            sent, out = _together(start(k + 1), out)
        outs.append(out)
    for k in range(len(turns) - len(groups), len(turns)):
        finish(k)
    after = zip(rows, contexts, strict=True)
    return tuple(probes.observe("layer", x, w, context, ex.cfg) for x, context in after)


def _together(*trees: Any) -> Any:
    """Return the trees. Whatever reads an array waits for all of them; integers have no gradient,
    and wait for nothing."""
    leaves, structure = jax.tree.flatten(trees)
    at = [i for i, a in enumerate(leaves) if jnp.issubdtype(a.dtype, jnp.inexact)]
    for i, a in zip(at, lax.optimization_barrier([leaves[i] for i in at]), strict=True):
        leaves[i] = a
    return jax.tree.unflatten(structure, leaves)
