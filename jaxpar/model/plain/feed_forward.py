"""`Glu`, `Mlp` and `Experts` in plain jax.numpy: all experts process all tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.components.experts import Experts, Router
from jaxpar.components.feed_forward import Glu
from jaxpar.components.model import Model
from jaxpar.config import Config
from jaxpar.model.plain.operations import Weights, hidden, times


def glu(a: Glu, h, w: Weights, positions, segments, model: Model, watch) -> jax.Array:
    """Compute a dense feed-forward, with or without a gate."""
    into = {n: times(h, w, f"w_{n}") + w.get(f"b_{n}", 0.0) for n in a.into}
    return times(hidden(a.activation, **into), w, "w_down") + w.get("b_down", 0.0)


class PlainRouting(NamedTuple):
    """What a layer's router did with a batch."""

    used: jax.Array
    """bool [B, T, E]: the experts of each token."""
    share: jax.Array
    """[B, T, E]: the scores divided by their sum."""
    logits: jax.Array
    """[B, T, E]."""
    per_token: int
    """Experts of each token."""


def experts(a: Experts, h, w: Weights, positions, segments, model: Model, watch) -> jax.Array:
    """Compute a mixture of experts. Experts that a token does not use have weight 0."""
    logits = h @ w["router"] + w.get("b_router", 0.0)
    scores, used = routed(logits, a.router.bias_on_scores(w), a.router, a.experts_per_token)
    share = scores / jnp.sum(scores, axis=-1, keepdims=True)
    watch("router", PlainRouting(used, share, logits, a.experts_per_token))
    weight = jnp.where(used, scores, 0.0)
    if a.router.normalize:
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    weight, x, of_each = weight * a.router.scale, h, "btd,edf->btef"
    if a.router.scales_input:
        x, of_each = h[:, :, None] * weight[..., None], "bted,edf->btef"
        weight = jnp.where(used, 1.0, 0.0)
    one = a.expert
    into = {n: jnp.einsum(of_each, x, w[f"w_{n}"]) + w.get(f"b_{n}", 0.0) for n in one.into}
    out = jnp.einsum("btef,efd,bte->btd", hidden(one.activation, **into), w["w_down"], weight)
    if one.bias:
        out = out + jnp.einsum("bte,ed->btd", weight, w["b_down"])
    if a.num_shared_experts:
        into = {n: times(h, w, f"w_shared_{n}") for n in one.into}
        shared = times(hidden(one.activation, **into), w, "w_shared_down")
        if a.shared_expert_gate:
            shared = shared * jax.nn.sigmoid(h @ w["w_shared_router"])[..., None]
        out = out + shared
    return out


def routed(logits, bias, router: Router, per_token: int) -> tuple[jax.Array, jax.Array]:
    """Return the scores [B, T, E], and which experts are used."""
    score = jax.nn.sigmoid if router.score == "sigmoid" else jax.nn.softmax
    scores = score(logits)
    order = scores + bias
    if router.groups > 1:  # all experts of other groups come after those of the chosen ones
        groups = order.reshape(*order.shape[:-1], router.groups, -1)
        best = jnp.sum(jnp.sort(groups, axis=-1)[..., -2:], axis=-1)
        chosen = _largest(best, router.groups_per_token)
        order = jnp.where(chosen[..., None], groups, -jnp.inf).reshape(order.shape)
    return scores, _largest(order, per_token)


def _largest(x, k: int):
    """Return which of the last dimension's entries are among the k largest.

    By index: XLA may compute `x` twice with different roundings, so comparing it with its own k-th
    largest value would lose that entry in some tokens.
    """
    return jnp.any(jax.nn.one_hot(jax.lax.top_k(x, k)[1], x.shape[-1], dtype=bool), axis=-2)


def router_loss(routing: PlainRouting, cfg: Config) -> jax.Array:
    """Compute a layer's weighted losses: the balance loss and the router's z-loss."""
    used, share, logits, per_token = routing
    tokens = (0, 1) if cfg.train.balance_over == "batch" else 1
    frequency = jnp.mean(used, axis=tokens) / per_token
    balance = used.shape[-1] * jnp.sum(frequency * jnp.mean(share, axis=tokens), axis=-1)
    z = jax.scipy.special.logsumexp(logits, axis=-1) ** 2
    t = cfg.train
    return t.balance_loss * jnp.mean(balance) + t.router_z_loss * jnp.mean(z)
