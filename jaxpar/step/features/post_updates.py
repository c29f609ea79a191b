"""What changes the weights after each update: `PostUpdate`, a user's function of the parameters."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxpar.config import Config, ConfigError
from jaxpar.config.values import Value
from jaxpar.model.parameters import specs_of, trainable_specs
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import shardings
from jaxpar.sharding.params import partition_specs
from jaxpar.step.feature import Feature
from jaxpar.step.layer_order import EMPTY, order_of

type Tree = dict[str, Any]

#: Names of parts of a state that are not of features.
RESERVED = ("step", "params", "opt_state")


class PostUpdate(Value):
    """A change of the weights after each update of the optimizer, with state of its own.

    A subclass defines `__call__`, on the parameters as a checkpoint has them: whole arrays, in the
    model's order of layers. In a run XLA shards the function, so that it moves what its operations
    need: reductions over a dim cost little, a transposition of a matrix more.
    """

    kind: ClassVar[str] = "PostUpdate"

    key: str = ""
    """Name of its state in checkpoints. Empty: that of the class."""

    def check(self, cfg: Config, path: str) -> None:
        name = type(self).__name__
        names = [update.name for update in post_updates_of(cfg)]
        if names.count(self.name) > 1 or self.name in (*RESERVED, *Feature.names):
            rule, fix = "is the name of another state", f'use key="{self.name}_2"'
            raise ConfigError(f"{path}: {name}.key", self.name, rule, fix)

    def extra(self, params: Tree) -> Tree:
        """Declare the state: a dict of `ParamSpec`; what is by layer, below "layers".

        The state is sharded, saved and resumed as parameters are, begins with the initial values of
        its specs, and is dropped by a run without this post-update.

        Args:     params: the `ParamSpec`s of the trainable parameters, with shapes and axes.
        """
        return {}

    def __call__(
        self, params: Tree, before: Tree, extra: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        """Compute the new parameters and state.

        Args:     params, before: after and before the optimizer's update, float32. extra: as
                  declared. step: int32 scalar, steps before this one.
        Returns:  (parameters, state), of the same structure. An update that is skipped for a
                  non-finite loss or gradient changes neither.
        """
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Name of its state in checkpoints."""
        return self.key or re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()


@dataclasses.dataclass(frozen=True)
class OwnPostUpdate(Feature):
    """A user's post-update as a feature: declares its state."""

    update: PostUpdate

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.update.name

    def is_on(self, cfg: Config) -> bool:
        return True

    def extra(self, cfg: Config, specs: Any) -> Any:
        return self.update.extra(specs) or ()

    def plain_state(self, cfg: Config, params: Any, initialize: Callable[[Any], Tree]) -> Any:
        specs = self.update.extra(trainable_specs(cfg))
        return initialize(specs) if specs else {}

    def plain(
        self, new: Any, before: Any, state: Any, step: Any, batch: Batch, cfg: Config
    ) -> tuple[Any, Any]:
        return self.update(new, before, state, step)


def post_updates_of(cfg: Config) -> tuple[PostUpdate, ...]:
    """Return the post-updates of a config, in order."""
    return tuple(value for value in cfg.train.post_updates if isinstance(value, PostUpdate))


def applied(
    cfg: Config,
    mesh: Mesh,
    params: Tree,
    before: Tree,
    extra: dict[str, Tree],
    step: jax.Array,
    ok: jax.Array,
) -> tuple[Tree, dict[str, Tree]]:
    """Apply every post-update to global arrays of a running state, outside the `shard_map`.

    Args:     params, before: all parameters after and before the update. extra: of all features.
              ok: bool scalar, whether the update counts.
    Returns:  (parameters, state of the post-updates by name), sharded as in a state.
    Communication: what XLA finds that the functions need.
    """
    new, old = _logical(params, cfg), _logical(before, cfg)
    found: dict[str, Tree] = {}
    with jax.named_scope("post_updates"):
        for update in post_updates_of(cfg):
            own = _logical(extra.get(update.name, {}), cfg)
            new, changed = update(new, old, own, step)
            found[update.name] = changed
    found = {name: tree for name, tree in found.items() if name in extra}
    to = shardings(mesh, partition_specs(specs_of(cfg)))
    keep = lambda a, b: jnp.where(ok, a, b)  # noqa: E731
    new = jax.tree.map(keep, _running(new, params, cfg), params)
    new = jax.tree.map(lax.with_sharding_constraint, new, to)
    state = {n: jax.tree.map(keep, _running(t, extra[n], cfg), extra[n]) for n, t in found.items()}
    return new, state


def _logical(tree: Tree, cfg: Config) -> Tree:
    """Put arrays by layer in the model's order."""

    def of(order: np.ndarray, a: jax.Array) -> jax.Array:
        slots = np.array([int(np.flatnonzero(order == i)[0]) for i in range(order.max() + 1)])
        return jnp.take(a, slots, axis=0)

    return _of_layers(of, cfg, tree)


def _running(tree: Tree, like: Tree, cfg: Config) -> Tree:
    """Put arrays by layer where the mesh has them. Empty slots stay as they are."""

    def of(order: np.ndarray, a: jax.Array, old: jax.Array) -> jax.Array:
        empty = order == EMPTY
        moved = jnp.take(a, np.where(empty, 0, order), axis=0)
        return jnp.where(empty.reshape(-1, *[1] * (a.ndim - 1)), old, moved)

    return _of_layers(of, cfg, tree, like)


def _of_layers(fn: Callable, cfg: Config, tree: Tree, *more: Tree) -> Tree:
    def one(path: Any, a: jax.Array, *others: jax.Array) -> jax.Array:
        order = order_of(path, cfg)
        return a if order is None else fn(order, a, *others)

    return jax.tree_util.tree_map_with_path(one, tree, *more)
