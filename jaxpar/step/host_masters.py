"""The weights that a step computes with, if the float32 masters are in host memory.

With `optimizer.offload_masters`, `TrainState.params` are in pinned host memory. A step begins with
a copy on the device, layer by layer, in which the matrices have the compute dtype: the dtype to
which the model would cast them first, so that no bit of loss or gradient changes. The update
streams the masters and the moments (`optimizer/moments.py`).

Source:   Rajbhandari et al. 2021 (2104.07857), section 5, of which this is the part about memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config
from jaxpar.model.parameters import specs_of
from jaxpar.optimizer.moments import TOP_SLICES
from jaxpar.parallel.host_offload import Space, in_host_memory
from jaxpar.sharding.axes import FSDP_AXES, axes_of
from jaxpar.sharding.params import ParamSpec, map_specs


def weights_on_device(params: Any, cfg: Config) -> Any:
    """Return the weights of a step, on local shards: those in host memory are copied.

    Args:     params: as in the state.
    Returns:  float32, in device memory. The values of matrices from host memory are rounded to the
              compute dtype, and XLA stores them in it: the conversion to float32 and back cancels.
    """
    if not any(map(in_host_memory, jax.tree.leaves(params))):
        return params

    def one(name: str) -> Any:
        slices = None if name in staged else TOP_SLICES
        fetch = lambda spec, x: _fetched(x, _dtype(spec, cfg), slices)  # noqa: E731
        return map_specs(fetch, specs[name], params[name])

    specs, staged = specs_of(cfg), cfg.model.stage_stacks
    return {name: one(name) for name in params}


def _dtype(spec: ParamSpec, cfg: Config) -> Any:
    """Return the dtype of a weight in a step: gathers cast theirs (`parallel/fsdp/gather.py`)."""
    gathered = set(FSDP_AXES) & axes_of(spec.partition_spec)
    return jnp.dtype(cfg.compute.dtype if gathered else jnp.float32)


def _fetched(x: jax.Array, dtype: Any, most: int | None) -> jax.Array:
    """Copy an array to the device in equal slices: at most `most`, or one for each row."""
    if not in_host_memory(x):
        return x
    slices = max(n for n in range(1, (most or len(x)) + 1) if len(x) % n == 0)
    rows = len(x) // slices

    def part(i: jax.Array) -> jax.Array:
        here = lax.dynamic_slice_in_dim(x, i * rows, rows)
        return jax.device_put(here, Space.Device).astype(dtype)

    whole = lax.map(part, jnp.arange(slices)).reshape(x.shape)
    return whole.astype(jnp.float32)
