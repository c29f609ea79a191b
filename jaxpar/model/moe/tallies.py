"""The tallies of a step: what the routers of its layers did, as gradients of weights of zeros."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.model.fused_weights import map_layers
from jaxpar.model.moe.router import TALLY, tally_size
from jaxpar.model.mtp import parameters as mtp
from jaxpar.parallel.collectives import varying
from jaxpar.sharding.params import of_prefix, with_prefix

type Tree = dict[str, Any]


def with_tallies(weights: Tree, cfg: Config) -> Tree:
    """Add a `router.TALLY` of zeros to each layer with experts whose router is trained."""
    if not cfg.model.num_experts or cfg.lora.rank:
        return weights
    size, depth = tally_size(cfg), cfg.model.mtp_depth

    def add(w: Tree) -> Tree:
        if "router" not in w:
            return w
        lead = w["router"].shape[:-2]
        return w | {TALLY: varying(jnp.zeros((*lead, size), jnp.float32))}

    modules = (
        with_prefix(n, add(of_prefix(n, weights["top"]))) for n in map(mtp.prefix, range(depth))
    )
    top = functools.reduce(operator.or_, modules, weights["top"])
    return {"top": top, "layers": map_layers(add, weights["layers"])}


def without_tallies(grads: Tree) -> tuple[Tree, jax.Array | None]:
    """Separate gradients into those of parameters and the tallies, float32 [layers,
    `router.tally_size`].

    Only layers with experts have a tally. Those of modules for multi-token prediction come last.
    """
    drop = lambda w: {n: g for n, g in w.items() if n != TALLY}  # noqa: E731
    one = lambda tree: isinstance(tree, dict) or _is_period(tree)  # noqa: E731
    layers = jax.tree.leaves(grads["layers"], is_leaf=one)
    tallies = [_tally(w) for w in layers if any(TALLY in one for one in _places(w))]
    if not tallies:
        return grads, None
    of_modules = {n: g for n, g in grads["top"].items() if n.endswith("." + TALLY)}
    tallies += [jnp.atleast_2d(of_modules[n]) for n in sorted(of_modules)]
    top = {n: g for n, g in grads["top"].items() if n not in of_modules}
    rest = {"top": top, "layers": map_layers(drop, grads["layers"])}
    return rest, jnp.concatenate(tallies)


def _tally(w: Tree | list[Tree]) -> jax.Array:
    """Return the tallies of a layer, of stacked layers, or of stacked periods, in model order."""
    if isinstance(w, list):
        stacked = jnp.stack([of_place[TALLY] for of_place in w if TALLY in of_place], axis=1)
        return stacked.reshape(-1, stacked.shape[-1])
    return jnp.atleast_2d(w[TALLY])


def _places(w: Tree | list[Tree]) -> list[Tree]:
    """Return the layers of a period, or the one tree of a layer or of stacked layers."""
    return w if isinstance(w, list) else [w]


def _is_period(tree: Any) -> bool:
    """Return whether a tree is the list of a period's layers, as `fuse` makes for `scan`."""
    return isinstance(tree, list)
