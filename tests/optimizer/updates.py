"""Updates of the train step alone: on a mesh, with random gradients that depend on the step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpar.certification import traces
from jaxpar.config import Config
from jaxpar.model.parameters import trainable_specs
from jaxpar.optimizer import moments
from jaxpar.step.layer_order import rows_here
from jaxpar.step.state import (
    TrainState,
    abstract_logical,
    init_state,
    state_shardings,
    state_specs,
    to_running,
)


def update_step(cfg: Config, mesh: Mesh) -> Any:
    """The jitted update of all parameters: (state, gradients) -> (parameters, optax state)."""
    specs, to = state_specs(cfg), state_shardings(cfg, mesh)

    def update(state, grads):
        layers = rows_here(cfg)
        return moments.update(
            cfg, trainable_specs(cfg), grads, state.opt_state, state.params, state.step, layers
        )

    inside = jax.shard_map(
        update, mesh=mesh, in_specs=(specs, specs.params), out_specs=(specs.params, specs.opt_state)
    )
    return jax.jit(inside, out_shardings=(to.params, to.opt_state))


def weights_after(cfg: Config, mesh: Mesh, steps: int) -> list[traces.Arrays]:
    """Weights after each of some updates, logical, by name."""
    step, to = update_step(cfg, mesh), state_shardings(cfg, mesh)
    state, after = init_state(cfg, mesh), []
    for i in range(steps):
        like = abstract_logical(cfg, mesh).params
        placed = jax.tree.map(lambda leaf: leaf.sharding, like)
        grads = jax.device_put(gradients(like, i), placed)
        params, opt_state = step(state, to_running(TrainState((), grads, ()), cfg).params)
        number = jax.device_put(jnp.int32(i + 1), to.step)
        state = TrainState(number, params, opt_state, state.extra)
        after.append({n: a.copy() for n, a in traces.logical(params, cfg).items()})
    return after


def gradients(like: Any, step: int) -> Any:
    """Gradients of the whole model, whose sizes differ from element to element."""
    rng = np.random.default_rng(step)
    draw = lambda a: (rng.normal(size=a.shape) * 10 ** rng.normal(size=a.shape)).astype(a.dtype)  # noqa: E731
    return jax.tree.map(draw, like)
