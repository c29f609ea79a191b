"""A layer's experts between the tokens and their sums, for tests."""

import jax

from jaxpar.model.moe.experts import ExpertWeights, of_sent
from jaxpar.model.moe.products import Products
from jaxpar.parallel.expert.dispatch import Dispatch


def expert_sums(
    how: Products,
    x: jax.Array,
    weights: jax.Array,
    w: ExpertWeights,
    plan: Dispatch,
    *,
    keeps: bool = True,
) -> jax.Array:
    """Return the weighted sum of each token's experts, [N, D].

    Args:     x: [N, D]. weights: float32 [N, k].
    """
    return plan.home(of_sent(how, keeps, plan.out(x), plan.pairs_out(weights), w, plan))
