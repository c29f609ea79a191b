"""Muon: momentum of matrices, orthogonalized by Newton-Schulz iterations.

An update of a matrix has singular values of about 1, whatever those of its gradients. Its size then
follows from its shape alone. Other parameters are updated by AdamW.

Source:   Jordan et al. 2024 (kellerjordan.github.io/posts/muon); Liu et al. 2025 (2502.16982).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxpar.config import OptimizerConfig
from jaxpar.optimizer.matrices import Matrices, is_matrix
from jaxpar.optimizer.widths import of_widths, scale_by_adam
from jaxpar.sharding.params import ParamSpec, map_specs

#: a, b and c of the iteration X <- a X + b (X X^T) X + c (X X^T)^2 X (Jordan et al.). They maximize
#: the slope at 0, and bring singular values near 1, not to it.
COEFFICIENTS = 3.4445, -4.7750, 2.0315

#: RMS of AdamW's updates, relative to the learning rate (2502.16982, section 2.2).
ADAMW_RMS = 0.2


class MuonState(NamedTuple):
    """The number of updates, and the momentum of the matrices."""

    count: Any
    mu: Any


def muon(
    cfg: OptimizerConfig, rate: optax.Schedule, mask: Any, matrices: Matrices
) -> optax.GradientTransformation:
    """Return the rule: Muon for matrices, AdamW for other parameters.

    Args:     mask: where weight decay applies.
    Source:   2502.16982, algorithm 1 and equation 4, with `muon_scale` "rms".
    """

    def decayed(rule: optax.GradientTransformation, rate: optax.Schedule):
        decay = optax.add_decayed_weights(cfg.weight_decay, mask=mask)
        return optax.chain(rule, decay, optax.scale_by_learning_rate(rate))

    specs = matrices.specs
    rules = {
        "muon": decayed(scale_by_muon(cfg, matrices), lambda i: cfg.muon_lr_ratio * rate(i)),
        "adamw": decayed(of_widths(scale_by_adam(cfg, specs), specs), rate),
    }
    labels = jax.tree.map(lambda is_one: "muon" if is_one else "adamw", matrices.mask())
    return optax.partition(rules, labels)


def scale_by_muon(cfg: OptimizerConfig, matrices: Matrices) -> optax.GradientTransformation:
    """Return the transformation of gradients of matrices to Muon's updates.

    The momentum is sharded like the parameters and elementwise. Only what is orthogonalized is
    exchanged, in `muon_dtype`.
    """
    beta = cfg.muon_momentum

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def direction(x: jax.Array) -> jax.Array:
        return orthogonalize(x, cfg.muon_steps, cfg.eps)

    def scaled(spec: ParamSpec, x: Any) -> Any:
        return scale(spec, cfg) * x.astype(jnp.float32) if is_matrix(spec) else x

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        del params
        mu = optax.tree.update_moment(grads, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        averaged = mu
        if cfg.muon_nesterov:
            ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
            now = optax.tree.bias_correction(grads, beta, count)
            averaged = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        sent = jax.tree.map(lambda x: x.astype(cfg.muon_dtype), averaged)
        found = matrices.map(direction, sent)
        return map_specs(scaled, matrices.specs, found), MuonState(count, mu)

    return optax.GradientTransformation(init, update)


@jax.named_scope("newton_schulz")
def orthogonalize(x: jax.Array, steps: int, eps: float) -> jax.Array:
    """Bring the singular values of matrices near 1, by Newton-Schulz iterations.

    Args:     x: [n, rows, columns]. steps: number of iterations. eps: added to the norm.
    Returns:  the same shape and dtype. Singular values between about 0.7 and 1.2 after five steps,
              if they were above 1/300 of the norm. Zeros for zeros.
    """
    a, b, c = COEFFICIENTS
    dtype, flip = x.dtype, x.shape[1] > x.shape[2]
    x = x.astype(jnp.float32)
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2), keepdims=True)) + eps)
    x = x.mT.astype(dtype) if flip else x.astype(dtype)  # the smaller dim first: fewer FLOPs
    exact = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    product = lambda p, q: jnp.matmul(p, q, precision=exact)  # noqa: E731
    for _ in range(steps):
        gram = product(x, x.mT)
        x = a * x + product(b * gram + c * product(gram, gram), x)
    return x.mT if flip else x


def scale(spec: ParamSpec, cfg: OptimizerConfig) -> float:
    """Return the factor of the orthogonalized update of a matrix.

    rms: the update's RMS is that of AdamW's, so AdamW's learning rate and weight decay carry over.
    width: its norm from RMS to RMS is at least 1.

    In µP, that norm is the same at all widths: that of the base model's matrix.

    Source:   Yang et al. 2023 (2310.17813), condition 1, for µP.
    """
    rows, columns = (n / wider for n, wider in zip(spec.matrix, spec.widths, strict=True))
    of_base = math.sqrt(max(1.0, columns / rows))
    if cfg.muon_scale == "rms":
        of_base = ADAMW_RMS * math.sqrt(max(rows, columns))
    return of_base * math.sqrt(spec.widths[1] / spec.widths[0])
