"""µP's learning rate of each parameter, and its eps, by the widths in its spec.

An update changes what a matrix computes by a sum over its inputs. If all elements of an update have
the size of the learning rate, as with Adam, the rate must be divided by the number of inputs,
relative to the base model. `ParamSpec.widths` has that ratio. Weight decay is not divided: rate
times decay is the same for all parameters and widths.

At the base model's widths, rules are the plain ones.

Source:   Yang et al. 2022 (2203.03466), table 8; Dey et al. 2025 (2505.01618), table 1.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.config import OptimizerConfig
from jaxpar.sharding.params import is_spec, map_specs

type Transformation = optax.GradientTransformation


def of_widths(rule: Transformation, specs: Any) -> Transformation:
    """Divide a rule's updates by the inputs of each matrix, relative to the base model.

    Args:     rule: with updates whose elements do not depend on the width. specs: of the
              parameters, some of which may be masked (`optax.partition`).
    """
    if all(spec.widths[0] == 1 for spec in jax.tree.leaves(specs, is_leaf=is_spec)):
        return rule
    factors = map_specs(lambda spec: 1 / spec.widths[0], specs)
    masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    times = lambda u, factor: u if masked(u) or factor == 1 else u * factor  # noqa: E731

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = rule.update(grads, state, params)
        return jax.tree.map(times, updates, factors, is_leaf=masked), state

    return optax.GradientTransformation(rule.init, update)


def scale_by_adam(cfg: OptimizerConfig, specs: Any) -> Transformation:
    """Return `optax.scale_by_adam` with an eps in proportion to the size of gradients.

    In wider models gradients are smaller. With a constant eps, some would fall below it.
    """
    plain = optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.eps)
    if all(spec.gradient == 1 for spec in jax.tree.leaves(specs, is_leaf=is_spec)):
        return plain
    eps = map_specs(lambda spec: cfg.eps * spec.gradient, specs)
    masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731

    def direction(m: Any, v: Any, eps: float) -> Any:
        return m if masked(m) else m / (jnp.sqrt(v) + eps)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        mu = optax.tree.update_moment(grads, state.mu, cfg.beta1, 1)
        nu = optax.tree.update_moment_per_elem_norm(grads, state.nu, cfg.beta2, 2)
        count = optax.safe_increment(state.count)
        first = optax.tree.bias_correction(mu, cfg.beta1, count)
        second = optax.tree.bias_correction(nu, cfg.beta2, count)
        found = jax.tree.map(direction, first, second, eps, is_leaf=masked)
        return found, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(plain.init, update)
