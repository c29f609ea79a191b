"""Initial values of a tree of parameters, shard by shard."""

import math
import zlib
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp

from jaxpar.sharding.params import ParamSpec, flat, map_specs


def initialize(specs: Any, seed: int | jax.Array) -> Any:
    """Initialize float32 parameters, a function of only the seed and their paths.

    Each leaf's key is derived from its path, so adding a parameter does not change the others, and
    the values do not depend on the mesh.

    Args:     specs: tree of ParamSpec. seed: run seed, or the key of it (`jax.random.key`).
    Returns:  tree of float32 arrays.
    """
    keys = leaf_keys(specs, seed)
    return map_specs(initial_values, specs, keys)


def leaf_keys(specs: Any, seed: int | jax.Array) -> Any:
    """Return the random key of each parameter, from the seed and its path: a tree of uint32 [2]."""
    is_key = jax.dtypes.issubdtype(jnp.result_type(seed), jax.dtypes.prng_key)
    root = seed if is_key else jax.random.key(seed)

    def key(path: str) -> jax.Array:
        return jax.random.key_data(jax.random.fold_in(root, zlib.crc32(path.encode())))

    return flax.traverse_util.unflatten_dict({p: key(p) for p in flat(specs)}, sep="/")


def initial_values(spec: ParamSpec, key: jax.Array) -> jax.Array:
    """Return the initial float32 values of one parameter. Under `jit` with `out_shardings`, each
    device computes only its own shard."""
    if spec.init == "ones":
        return jnp.ones(spec.shape, spec.dtype)
    if spec.init == "zeros":
        return jnp.zeros(spec.shape, spec.dtype)
    random = jax.random.wrap_key_data(key)
    if spec.init == "decay_rate":
        return jnp.log(jax.random.uniform(random, spec.shape, jnp.float32, 1, 16))
    if spec.init == "time_step":
        ends = math.log(0.001), math.log(0.1)
        step = jnp.exp(jax.random.uniform(random, spec.shape, jnp.float32, *ends))
        return step + jnp.log(-jnp.expm1(-step))
    return spec.std * jax.random.normal(random, spec.shape, jnp.float32)


def init_options(platform: str) -> tuple[tuple[str, int], ...]:
    """Return compiler options for programs that initialize parameters on a platform, as (name,
    value) pairs.

    On CPUs, LLVM's highest optimization level takes up to five times as long to compile as the one
    below, for the same bits at the same speed: with 2 CPU cores and JAX 0.11.2, a tiny model's
    weights took 8 CPU seconds instead of 3. If JAX is configured to optimize even less, no options
    are set.
    """
    if platform != "cpu" or jax.config.read("jax_disable_most_optimizations"):
        return ()
    return (("xla_backend_optimization_level", 2),)
