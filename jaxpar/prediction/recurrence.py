"""Predicts which backend computes the recurrences of a model."""

import dataclasses

from jaxpar.components.recurrent import Recurrent
from jaxpar.config import ComputeConfig, Config
from jaxpar.kernels.platform import Platform


def with_backend(cfg: Config, platform: Platform) -> Config:
    """Return the config with the backend that `compute.recurrent_backend` auto takes on a platform.

    The reference, unless kernels compute every recurrence of the model.
    """
    c, layers = cfg.compute, cfg.model.layers
    mixers = {layer.mixer for layer in layers if isinstance(layer.mixer, Recurrent)}
    if c.recurrent_backend != "auto" or not mixers:
        return cfg
    from jaxpar.kernels import recurrence

    shapes = [recurrence.Shape(one.chunk, *one.state[1:], c.dtype) for one in mixers]
    chosen = {recurrence.choose("auto", shape, platform) for shape in shapes}
    kernels = all(one.has_kernels for one in mixers) and chosen == {"triton"}
    there = dataclasses.replace(c, recurrent_backend="triton" if kernels else "reference")
    return dataclasses.replace(cfg, compute=there)


def by_kernels(compute: ComputeConfig) -> bool:
    """Return whether kernels compute recurrences, after `with_backend`."""
    return compute.recurrent_backend == "triton"
