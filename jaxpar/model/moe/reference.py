"""The router in plain jax.numpy, for the reference model (`model/reference.py`)."""

import jax
import jax.numpy as jnp

from jaxpar.config import Config, ModelConfig


def router_loss(router, cfg: Config):
    """Compute a layer's weighted losses: the balance loss and the router's z-loss."""
    used, share, logits = router
    tokens = (0, 1) if cfg.train.balance_over == "batch" else 1
    frequency = jnp.mean(used, axis=tokens) / cfg.model.experts_per_token
    balance = cfg.model.num_experts * jnp.sum(frequency * jnp.mean(share, axis=tokens), axis=-1)
    z = jax.scipy.special.logsumexp(logits, axis=-1) ** 2
    t = cfg.train
    return t.balance_loss * jnp.mean(balance) + t.router_z_loss * jnp.mean(z)


def router(logits, bias, m: ModelConfig):
    """Return scores [B, T, E], which experts are used, and the scores divided by their sum."""
    score = jax.nn.sigmoid if m.router_score == "sigmoid" else jax.nn.softmax
    scores = score(logits)
    order = scores + bias
    if m.router_groups > 1:  # all experts of other groups come after those of the chosen ones
        groups = order.reshape(*order.shape[:-1], m.router_groups, -1)
        best = jnp.sum(jnp.sort(groups, axis=-1)[..., -2:], axis=-1)
        chosen = _largest(best, m.router_groups_per_token)
        order = jnp.where(chosen[..., None], groups, -jnp.inf).reshape(order.shape)
    used = _largest(order, m.experts_per_token)
    return scores, used, scores / jnp.sum(scores, axis=-1, keepdims=True)


def _largest(x, k: int):
    """Return which of the last dimension's entries are among the k largest.

    By index: XLA may compute `x` twice with different roundings, so comparing it with its own k-th
    largest value would lose that entry in some tokens.
    """
    return jnp.any(jax.nn.one_hot(jax.lax.top_k(x, k)[1], x.shape[-1], dtype=bool), axis=-2)
