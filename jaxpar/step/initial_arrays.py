"""The initial values of some arrays of a state: of layers that a checkpoint does not have."""

from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.model.parameters import specs_of
from jaxpar.sharding.fingerprint import named_leaves
from jaxpar.sharding.initial_values import initialize
from jaxpar.sharding.params import flat
from jaxpar.step.diloco import trainers
from jaxpar.step.features import features_of
from jaxpar.step.state import extra_specs, init_arrays, init_opt_state


def initial_arrays(
    cfg: Config, wanted: Mapping[str, jax.ShapeDtypeStruct], replicas: int
) -> dict[str, jax.Array]:
    """Return arrays of a logical state as a new run begins with them.

    Each device creates only its own shards. Parameters have the bits of `init_state`.

    Args:     wanted: abstract arrays with shardings, by their names in a checkpoint. replicas: of
              DiLoCo, in the arrays; 0 without.
    """
    found: dict[str, jax.Array] = {}
    for part in dict.fromkeys(name.partition("/")[0] for name in wanted):
        of_part = {n.partition("/")[2]: a for n, a in wanted.items() if n.startswith(f"{part}/")}
        found |= {f"{part}/{n}": a for n, a in _of_part(cfg, part, of_part, replicas).items()}
    return found


def _of_part(
    cfg: Config, part: str, wanted: Mapping[str, jax.ShapeDtypeStruct], replicas: int
) -> Mapping[str, jax.Array]:
    to = {name: array.sharding for name, array in wanted.items()}
    if part == "params":
        return _of_specs(cfg, specs_of(cfg), to)
    if part in ("opt_state", "diloco"):
        return _computed(cfg, part, to, replicas)
    if part == "feedback":
        return {name: jnp.zeros(a.shape, a.dtype, device=a.sharding) for name, a in wanted.items()}
    feature = next(one for one in features_of(cfg) if one.name == part)
    params = _of_specs(
        cfg, specs_of(cfg), {n: a for n, a in to.items() if n in flat(specs_of(cfg))}
    )
    kept = feature.initial(cfg, flax.traverse_util.unflatten_dict(params, sep="/"))
    return _of_specs(cfg, extra_specs(cfg)[part], to) if kept is None else flat(kept)


def _of_specs(cfg: Config, specs: Any, to: Mapping[str, Any]) -> dict[str, jax.Array]:
    tree = lambda leaves: flax.traverse_util.unflatten_dict(leaves, sep="/")  # noqa: E731
    chosen = {name: flat(specs)[name] for name in to}
    return flat(init_arrays(tree(chosen), cfg.train.seed, tree(to)))


def _computed(cfg: Config, part: str, to: dict[str, Any], replicas: int) -> dict[str, jax.Array]:
    """Return what begins with a function of the parameters, of which only that is computed."""

    def make() -> dict[str, jax.Array]:
        params = initialize(specs_of(cfg), cfg.train.seed)
        if part == "diloco":
            found = trainers.start(params, replicas, None)
        else:
            found = trainers.for_each(init_opt_state(cfg, params), replicas)
        leaves = named_leaves(found)
        return {name: leaves[name] for name in to}

    return jax.jit(make, out_shardings=to)()
