"""The exponential moving average of the weights (EMA), which evaluations and programs may use.

After update t, counted from 1, with weights w:

    average = d average + (1 - d) w,    d = min(optimizer.ema.decay, (1 + t) / (10 + t))

The second term of the minimum keeps the initial weights from weighing long. The average is computed
in float32, and stored in `optimizer.ema.dtype`: bfloat16 is rounded stochastically, because a
change of 1 - d is often less than half the distance between neighbors.

Source:   Polyak and Juditsky 1992; the decay is that of TensorFlow's `ExponentialMovingAverage`.
"""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config, present
from jaxpar.model.parameters import specs_of
from jaxpar.optimizer.moments import rows_of
from jaxpar.optimizer.stochastic_rounding import random_bits, round_to_bfloat16
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.hashing import hash_uint32
from jaxpar.sharding.params import flat, map_specs, partition_specs, split
from jaxpar.step.conversions import convert_dtype
from jaxpar.step.feature import Feature
from jaxpar.step.progress import TrainStep


class MovingAverage(Feature):
    """The average of all updates' weights, which evaluations may use."""

    name = "ema"
    turn = 20
    begins = "the moving average begins with the weights of"
    handles_skips = True
    of_final_weights = True

    def is_on(self, cfg: Config) -> bool:
        return cfg.optimizer.ema is not None

    def extra(self, cfg: Config, specs: Any) -> Any:
        dtype = present(cfg.optimizer.ema).dtype
        return map_specs(lambda s: dataclasses.replace(s, dtype=dtype), specs)

    def initial(self, cfg: Config, params: Any) -> Any:
        dtype = jnp.dtype(present(cfg.optimizer.ema).dtype)
        return jax.tree.map(lambda x: convert_dtype(x.sharding, dtype)(x), params)

    def after_update(self, s: TrainStep) -> TrainStep:
        new = update(s.cfg, s.specs, s.extra["ema"], s.trainable, s.step, s.layers, s.ok)
        return s.with_extra(ema=new)

    def plain_state(self, cfg: Config, params: Any, initialize: Any) -> Any:
        return params

    def plain(
        self, new: Any, before: Any, state: Any, step: Any, batch: Batch, cfg: Config
    ) -> tuple[Any, Any]:
        keep = jnp.minimum(present(cfg.optimizer.ema).decay, (2 + step) / (11 + step))
        trainable, _ = split(new, specs_of(cfg))
        return new, jax.tree.map(lambda a, w: keep * a + (1 - keep) * w, state, trainable)


def decay(most: float, step: jax.Array) -> jax.Array:
    """Return the decay of the update of `step`, counted from 0: float32 scalar."""
    t = (step + 1).astype(jnp.float32)
    return jnp.minimum(most, (1 + t) / (10 + t))


def update(
    cfg: Config,
    specs: Any,
    average: Any,
    params: Any,
    step: jax.Array,
    layers: Mapping[str, jax.Array],
    ok: jax.Array,
) -> Any:
    """Update the average once, on local shards.

    Args:     specs: of the trainable parameters. average: as stored. params: the new
              trainable parameters, float32. step: int32 scalar, counted from 0. layers: as in
              `moments.update`. ok: bool scalar; if False, the average is returned unchanged, bit
              for bit.
    Returns:  the average, in the dtype of the input.
    """
    keep, spec_of = decay(present(cfg.optimizer.ema).decay, step), flat(partition_specs(specs))
    row_of = flat(rows_of(specs, params, layers))

    def one(path: Any, old: jax.Array, param: jax.Array) -> jax.Array:
        before = old.astype(jnp.float32)
        new = before + (1 - keep) * (param - before)
        if old.dtype == jnp.bfloat16:
            name = "/".join(key.key for key in path)
            seed = jnp.uint32(cfg.train.seed ^ zlib.crc32(f"ema/{name}".encode()))
            key = hash_uint32(hash_uint32(seed) + step.astype(jnp.uint32))
            bits = random_bits(key, new.shape, spec_of[name], row_of[name])
            new = round_to_bfloat16(new, bits)
        return jnp.where(ok, new, old)

    return jax.tree_util.tree_map_with_path(one, average, params)


FEATURE = MovingAverage()
