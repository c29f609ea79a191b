"""The rule by which drafts are accepted: what it returns is distributed as without drafts.

A draft d, sampled from q, is accepted with probability min(1, p(d) / q(d)), where p are the model's
chances. After the first that is rejected, the token comes from max(p - q, 0), normalized; after all
have been accepted, from p. If both always take the most likely token, a draft is accepted if it is
the model's.

Source:   Leviathan et al. 2023 (2211.17192), algorithm 1.
"""

import jax
import jax.numpy as jnp


def num_accepted(
    target: jax.Array, proposed: jax.Array, drafts: jax.Array, uniform: jax.Array
) -> jax.Array:
    """Return how many drafts of each row are accepted, int32 [B].

    Args:     target: the model's chances, float32 [B, N + 1, V], and those after all drafts.
              proposed: the chances from which drafts are sampled, float32 [B, N, V]. drafts: int32
              [B, N]. uniform: random numbers in [0, 1), float32 [B, N].
    """
    of_drafts = lambda a: jnp.take_along_axis(a, drafts[..., None], axis=-1)[..., 0]  # noqa: E731
    accepted = uniform * of_drafts(proposed) < of_drafts(target[:, :-1])
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1)


def next_chances(target: jax.Array, proposed: jax.Array, accepted: jax.Array) -> jax.Array:
    """Return the chances of the token after the accepted drafts, float32 [B, V], not normalized.

    Args:     target, proposed: as in `num_accepted`. accepted: its result.
    """
    beyond = jnp.pad(proposed, ((0, 0), (0, 1), (0, 0)))  # nothing is proposed after all drafts
    p, q = (jnp.take_along_axis(a, accepted[:, None, None], axis=1)[:, 0] for a in (target, beyond))
    rest = jnp.maximum(p - q, 0.0)
    # By rounding alone, all of p can be below q; a draft was then rejected with no chance to be.
    return jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, p)
