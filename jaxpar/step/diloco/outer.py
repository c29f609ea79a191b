"""The outer step: outer weights move towards the mean of the replicas', which start from them anew.

With several fragments, each has its outer steps in turn. Fragment i of n has the layers whose index
is i modulo n; the first also has embeddings, the last what comes after the layers.

Source:   Douillard et al. 2023 (2311.08105), algorithm 1; Douillard et al. 2025 (2501.18512),
          section 2.2 and its strided fragments.
"""

import dataclasses
import functools
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxpar.config import Config
from jaxpar.model.parameters import specs_of
from jaxpar.parallel.collectives import all_gather_invariant, all_to_all, psum
from jaxpar.sharding.axes import REPLICA
from jaxpar.sharding.params import flat
from jaxpar.step.diloco.trainers import MOMENTUM, WEIGHTS
from jaxpar.step.state import TrainState, state_shardings, state_specs

#: Arrays outside the layers that belong to the first fragment. All others belong to the last.
FIRST = ("embed", "positions")


def due(done: int, cfg: Config) -> list[int]:
    """Return the fragments that have an outer step after `done` steps.

    After the last step of the run, all of them do: no inner step is lost.
    """
    d = cfg.diloco
    if not d.every:
        return []
    if done == cfg.train.num_steps:
        return list(range(d.fragments))
    return [i for i in range(d.fragments) if (done - i * d.every // d.fragments) % d.every == 0]


class OuterSteps:
    """The programs of the outer steps, one for each fragment."""

    def __init__(self, cfg: Config, mesh: Mesh):
        self._cfg = cfg
        fragments = range(cfg.diloco.fragments if cfg.diloco.every else 0)
        self._programs = [make_outer_step(cfg, mesh, i) for i in fragments]

    def compile(self, state: TrainState) -> None:
        """Compile the programs for calls with such a state, which may be abstract."""
        for program in self._programs:
            program.lower(state.params, state.diloco).compile()  # JAX keeps it for calls

    def __call__(self, done: int, state: TrainState) -> TrainState:
        """Take the outer steps that are due after `done` steps. Donates the state if there are any.

        Returns:  the state, which is the same without DiLoCo.
        """
        for i in due(done, self._cfg):
            state = self.step(i, state)
        return state

    def step(self, fragment: int, state: TrainState) -> TrainState:
        """Take the outer step of a fragment. Donates the state."""
        params, diloco = self._programs[fragment](state.params, state.diloco)
        return dataclasses.replace(state, params=params, diloco=diloco)


def make_outer_step(cfg: Config, mesh: Mesh, fragment: int) -> Any:
    """Return the jitted outer step of a fragment: (params, diloco) -> the same, donated."""
    specs, to = state_specs(cfg), state_shardings(cfg, mesh)
    step = jax.shard_map(
        functools.partial(outer_step, cfg, fragment),
        mesh=mesh,
        in_specs=(specs.params, specs.diloco),
        out_specs=(specs.params, specs.diloco),
    )
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(to.params, to.diloco))


# ------------------------------------------------- inside the shard_map, on local shards


@jax.named_scope("outer_step")
def outer_step(cfg: Config, fragment: int, params: Any, diloco: Any) -> tuple[Any, Any]:
    """Take the outer step of a fragment.

    Args:     params: the outer weights. diloco: as in `trainers.py`, with this replica's weights
              alone.
    Communication: the mean of the fragment's outer gradient over REPLICA, in `diloco.outer_dtype`.
    """
    n, specs = cfg.diloco.fragments, flat(specs_of(cfg))
    outer, momentum, own = flat(params), flat(diloco[MOMENTUM]), flat(diloco[WEIGHTS])
    for name, spec in specs.items():
        if spec.axes[0] == "layer":
            new = _of_layers(cfg, fragment, outer[name], momentum[name], own[name][0])
        elif fragment == (0 if name in FIRST else n - 1):
            new = _nesterov(cfg, outer[name], momentum[name], own[name][0])
        else:
            continue
        outer[name], momentum[name] = new[:2]
        own[name] = new[2][None]
    of_replicas = {WEIGHTS: _tree(own), MOMENTUM: _tree(momentum)}
    return _tree(outer), of_replicas


def _of_layers(cfg: Config, fragment: int, *stacks: jax.Array) -> tuple[jax.Array, ...]:
    """`_nesterov` of the fragment's layers in stacks of layers [L, ...]."""
    n = cfg.diloco.fragments
    apart = [x.reshape(-1, n, *x.shape[1:]) for x in stacks]
    new = _nesterov(cfg, *(x[:, fragment] for x in apart))
    put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=fragment, axis=1)
    return tuple(
        put(x, part[:, None]).reshape(whole.shape)
        for x, part, whole in zip(apart, new, stacks, strict=True)
    )


def _nesterov(
    cfg: Config, outer: jax.Array, momentum: jax.Array, own: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the new outer weights and momentum, and the weights that a replica starts from."""
    d = cfg.diloco
    gradient = mean_of_replicas(outer - own, d.outer_dtype)
    momentum = d.outer_momentum * momentum + gradient
    outer = outer - d.outer_learning_rate * (gradient + d.outer_momentum * momentum)
    return outer, momentum, outer


def mean_of_replicas(x: jax.Array, dtype: str) -> jax.Array:
    """Return the mean over REPLICA, in float32, the same on every replica.

    bfloat16 rounds twice: what is sent, and the mean. Each replica sums a part of the elements.

    Args:     x: float32. dtype: in which it is exchanged.
    Communication: float32: an all-reduce. bfloat16: an all-to-all and an all-gather of as many
              elements as a ring's all-reduce sends.
    """
    n = lax.axis_size(REPLICA)
    if dtype == "float32":
        return psum(x, REPLICA) / n
    pieces = jnp.pad(_bits(x).ravel(), (0, -x.size % n)).reshape(n, -1)
    mean = jnp.mean(_of_bits(all_to_all(pieces, REPLICA, 0, 0)), axis=0)
    found = _of_bits(all_gather_invariant(_bits(mean), (REPLICA,), 0))
    return found[: x.size].reshape(x.shape)


def _bits(x: jax.Array) -> jax.Array:
    """Round to bfloat16, as uint16: XLA for CPUs would send bfloat16 as float32."""
    return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def _of_bits(x: jax.Array) -> jax.Array:
    """Return the float32 numbers of `_bits`."""
    return lax.bitcast_convert_type(x, jnp.bfloat16).astype(jnp.float32)


def _tree(leaves: dict[str, jax.Array]) -> Any:
    return flax.traverse_util.unflatten_dict(leaves, sep="/")
