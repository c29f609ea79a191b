"""The bytes that replicas exchange with DiLoCo, and what they would without it."""

import math

import jax.numpy as jnp

from jaxpar.config import Config, present
from jaxpar.model.parameters import trainable_specs
from jaxpar.sharding.axes import REPLICA, axes_of
from jaxpar.sharding.params import ParamSpec, flat
from jaxpar.step.diloco.fragments import FIRST


def fragment_bytes(cfg: Config) -> list[int]:
    """Return the bytes that a device sends over REPLICA in the outer step of each fragment.

    A ring's all-reduce of n bytes over R replicas sends 2 n (R - 1) / R. Padding does not count.
    """
    d, r = present(cfg.diloco), cfg.parallel.replica
    width = jnp.dtype(d.outer_dtype).itemsize
    sizes = [0] * d.fragments
    for name, spec in flat(trainable_specs(cfg)).items():
        size = _on_device(spec, cfg)
        if spec.axes[0] == "layer":
            sizes = [before + size // d.fragments for before in sizes]
        else:
            sizes[0 if name in FIRST else -1] += size
    return [2 * width * size * (r - 1) // r for size in sizes]


def gradient_bytes(cfg: Config) -> int:
    """Return the bytes that a device sends over REPLICA to sum float32 gradients in one step."""
    size = sum(_on_device(spec, cfg) for spec in flat(trainable_specs(cfg)).values())
    return 2 * 4 * size * (cfg.parallel.replica - 1) // cfg.parallel.replica


def in_words(cfg: Config) -> str:
    """Describe the replicas and what they exchange, for the log."""
    d, sent = present(cfg.diloco), fragment_bytes(cfg)
    how = f" in {d.fragments} fragments" if d.fragments > 1 else ""
    how += f" beside {d.overlap} inner steps" if d.overlap else ""
    at_a_time = max(sent) / max(d.overlap, 1) / 1e6
    most = f", at most {at_a_time:,.3g} MB {'in a step' if d.overlap else 'at a time'}"
    average = f"{sum(sent) / d.every / 1e6:,.3g} MB per step and device over {REPLICA}"
    return (
        f"{cfg.parallel.replica} replicas train on their own, with an outer step every {d.every} "
        f"steps{how + most if how else ''}: {average}, in place of "
        f"{gradient_bytes(cfg) / 1e6:,.3g} MB"
    )


def _on_device(spec: ParamSpec, cfg: Config) -> int:
    """Return the elements of a parameter's shard on one device."""
    ways = math.prod(getattr(cfg.parallel, axis) for axis in sorted(axes_of(spec.partition_spec)))
    return math.prod(spec.shape) // ways
