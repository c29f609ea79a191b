"""Layers that take groups of rows in turns, so that communication hides."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config
from jaxpar.execution.remat import named
from jaxpar.model.layer import Pieces, Tree, add_output, attend, feed_forward, normed_pieces
from jaxpar.model.token_context import Tokens
from jaxpar.parallel.gradient_buffers import for_use


def in_groups(tree: Any, groups: int) -> tuple[Any, ...]:
    """Arrays of [B, ...], cut into groups of rows."""
    cut = lambda i: jax.tree.map(lambda a: jnp.split(a, groups)[i], tree)  # noqa: E731
    return tuple(cut(i) for i in range(groups)) if groups > 1 else (tree,)


def layer_in_turns(
    xs: tuple[jax.Array, ...], w: Tree, tokens: tuple[Tokens, ...], cfg: Config
) -> tuple[jax.Array, ...]:
    """`layer` on groups of rows, one's communication over TENSOR beside another's computation.

    The groups take turns: all attend, then all feed forward. What the next turn needs must be
    there when a turn ends, so it is on its way meanwhile; the backward runs the turns, and the
    same rule, in reverse.

    Args:     xs: [B/groups, T/(sequence*tensor), D] each. tokens: of each.
    Returns:  as xs.
    Source:   Wang et al. 2024 (2409.15241), Domino: the split of the batch.
    """
    rows, n = list(xs), len(xs)
    uses = [for_use(w, i) for i in range(n)]
    partial: list[jax.Array] = []

    def input_of(turn: int) -> Pieces:
        i = turn % n
        with jax.named_scope("attention" if turn < n else "feed_forward"):
            if turn < n:
                rows[i], hs = normed_pieces(rows[i], w, "attn_norm", cfg)
                return hs
            rows[i] = named(add_output(rows[i], partial[i], w, "attn", cfg), "attn_residual")
            rows[i], hs = normed_pieces(rows[i], w, "mlp_norm", cfg)
            return hs

    hs = input_of(0)
    for turn in range(2 * n):
        with jax.named_scope("attention" if turn < n else "feed_forward"):
            mine = uses[turn % n]
            if turn < n:
                (out,) = attend(hs, mine, tokens[turn], cfg)
            else:
                out = feed_forward(hs[0], mine, cfg)
        if turn + 1 < 2 * n:
            hs, out = lax.optimization_barrier((input_of(turn + 1), out))
        partial.append(out)
    with jax.named_scope("feed_forward"):
        return tuple(
            add_output(x, out, w, "mlp", cfg) for x, out in zip(rows, partial[n:], strict=True)
        )
