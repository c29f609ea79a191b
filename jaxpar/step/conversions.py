"""Conversions of a state's arrays to the dtypes and the storage of moments of another config."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config
from jaxpar.config.schema.optimizer import AVERAGED
from jaxpar.model.parameters import trainable_specs
from jaxpar.optimizer import moments
from jaxpar.optimizer.blockwise import is_quantized
from jaxpar.sharding.params import ParamSpec, flat

Space = jax.memory.Space


def in_configured_dtypes(state: Any, wanted: Any, cfg: Config) -> Any:
    """Convert moments and moving average to the storage of the config, rounding to nearest.

    Args:     state: a TrainState. wanted: the same with the config's shapes, dtypes and shardings,
              as abstract arrays.
    """
    specs = trainable_specs(cfg)
    spec_of = flat(specs)

    def converted(field: str | None, name: str, moment: Any, to: Any) -> Any:
        if field is None or _are_alike(moment, to):
            return moment
        if not is_quantized(moment) and not is_quantized(to):
            return convert_dtype(moment.sharding, to.dtype)(moment)
        return _restored(field, spec_of[name], moment, to, cfg)

    stored = lambda x, to: x if x.dtype == to.dtype else convert_dtype(x.sharding, to.dtype)(x)  # noqa: E731
    opt_state = moments.map_moments(converted, specs, state.opt_state, wanted.opt_state)
    state = dataclasses.replace(state, opt_state=opt_state)
    if AVERAGED not in state.extra:  # none, or one that begins with the weights
        return state
    averages = (of.extra[AVERAGED] for of in (state, wanted))
    return state.with_extra(**{AVERAGED: jax.tree.map(stored, *averages)})


def _are_alike(moment: Any, to: Any) -> bool:
    kind = lambda tree: jax.tree.map(lambda a: (a.shape, jnp.dtype(a.dtype)), tree)  # noqa: E731
    return kind(moment) == kind(to)


def _restored(field: str, spec: ParamSpec, moment: Any, to: Any, cfg: Config) -> Any:
    """Convert a moment to or from 8 bits, or to other blocks."""

    def convert(kept: Any) -> Any:
        exact = moments.in_float32(field, _on_device(kept))
        return moments.stored(field, spec, exact, cfg.optimizer)

    return jax.jit(convert, out_shardings=jax.tree.map(lambda a: a.sharding, to))(moment)


def _on_device(tree: Any) -> Any:
    # Without the barrier, XLA would turn a conversion into a copy within host memory.
    return lax.optimization_barrier(jax.device_put(tree, Space.Device))


@functools.cache
def convert_dtype(sharding: Any, dtype: Any):
    """Return the compiled dtype conversion of an array, computed on the device.

    Converting an array to its own dtype copies it.
    """
    return jax.jit(lambda x: _on_device(x).astype(dtype), out_shardings=sharding)
