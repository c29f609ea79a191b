"""Initial values of a tree of parameters, shard by shard."""

import zlib
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp

from jaxpar.sharding.params import ParamSpec, flat, map_specs


def initialize(specs: Any, seed: int | jax.Array) -> Any:
    """Initial float32 parameters, a function of (seed, path) alone.

    Each leaf's key is derived from its path, so adding a parameter leaves the others as they were,
    and the values do not depend on the mesh.

    Args:     specs: tree of ParamSpec. seed: run seed.
    Returns:  tree of float32 arrays.
    """
    keys = leaf_keys(specs, seed)
    return map_specs(initial_values, specs, keys)


def leaf_keys(specs: Any, seed: int | jax.Array) -> Any:
    """The random key of each parameter, a function of (seed, path): a tree of uint32 [2]."""
    root = jax.random.key(seed)

    def key(path: str) -> jax.Array:
        return jax.random.key_data(jax.random.fold_in(root, zlib.crc32(path.encode())))

    return flax.traverse_util.unflatten_dict({p: key(p) for p in flat(specs)}, sep="/")


def initial_values(spec: ParamSpec, key: jax.Array) -> jax.Array:
    """One parameter's initial float32 values. Under `jit` with `out_shardings`, each device makes
    only its own shard of them."""
    if spec.init == "ones":
        return jnp.ones(spec.shape, jnp.float32)
    if spec.init == "zeros":
        return jnp.zeros(spec.shape, jnp.float32)
    return spec.std * jax.random.normal(jax.random.wrap_key_data(key), spec.shape, jnp.float32)


def init_options(platform: str) -> tuple[tuple[str, int], ...]:
    """Compiler options for a program of initial values on "cpu", or another platform: names and
    values.

    For a CPU, LLVM's highest level takes up to five times as long as the one below it, and both
    make the same bits, no sooner: with 2 CPU cores and JAX 0.11.2, a tiny model's weights took 8
    CPU seconds instead of 3. Where JAX is told to optimize less than that, nothing is asked for.
    """
    if platform != "cpu" or jax.config.read("jax_disable_most_optimizations"):
        return ()
    return (("xla_backend_optimization_level", 2),)
