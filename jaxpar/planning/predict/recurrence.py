"""Predicts which backend computes the recurrences of a model."""

import dataclasses

from jaxpar.components.recurrent import Recurrent
from jaxpar.config import Config, ModelConfig
from jaxpar.config.layout.composition import model_of
from jaxpar.kernels import recurrence
from jaxpar.kernels.platform import Platform


def with_backend(cfg: Config, platform: Platform) -> Config:
    """Return the config with the backend that `model.recurrent_backend` auto takes on a platform.

    The reference, unless kernels compute every recurrence of the model.
    """
    m = cfg.model
    mixers = {layer.mixer for layer in model_of(m).layers if isinstance(layer.mixer, Recurrent)}
    if m.recurrent_backend != "auto" or not mixers:
        return cfg
    shapes = [recurrence.Shape(one.chunk, *one.state[1:], m.dtype) for one in mixers]
    chosen = {recurrence.choose("auto", shape, platform) for shape in shapes}
    kernels = all(one.has_kernels for one in mixers) and chosen == {"triton"}
    there = dataclasses.replace(m, recurrent_backend="triton" if kernels else "reference")
    return dataclasses.replace(cfg, model=there)


def by_kernels(m: ModelConfig) -> bool:
    """Return whether kernels compute the model's recurrences, after `with_backend`."""
    return m.recurrent_backend == "triton"
