"""Makes a config small and exact enough to compare meshes."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from jaxpar.components.dims import SmallSizes
from jaxpar.components.experts import d_ff, experts_in, head_dim
from jaxpar.components.model import Layer
from jaxpar.config import Config, ConfigError, Model, ParallelConfig, replace, value_of
from jaxpar.config.layout.layer_split import layers_per_chunk
from jaxpar.config.lists.lora_targets import least_side
from jaxpar.config.lists.step_sizes import without_schedules
from jaxpar.config.schema.optimizer import EmaConfig
from jaxpar.config.validate import check
from jaxpar.model.parameters import trainable_specs
from jaxpar.sharding.params import count


def float32(cfg: Config) -> Config:
    """Return the config in float32, with the reference kernels, which run on all devices.

    Replicas sum their gradients: with DiLoCo, each would train on its own.
    """
    if cfg.optimizer.ema:
        cfg = replace(cfg, **{"optimizer.ema.dtype": "float32"})
    return replace(
        cfg,
        diloco=None,
        **{
            "compute.dtype": "float32",
            "compute.matmul_dtype": "compute",
            "compute.float8_scaling": "tensor",
            "compute.attention_backend": "reference",
            "compute.recurrent_backend": "auto",
            "parallel.grad_reduce": "float32",
            "parallel.gather_dtype": "compute",
            "parallel.replica_reduction": "float32",
            "optimizer.first_moment_dtype": "float32",
            "optimizer.second_moment_dtype": "float32",
            "optimizer.muon_dtype": "float32",
        },
    )


#: Weights of the terms of the loss that `thorough` turns on, and the decay of the average.
Z_LOSS, BALANCE_LOSS, ROUTER_Z_LOSS, EMA_DECAY = 1e-3, 1e-2, 1e-3, 0.9


def thorough(cfg: Config) -> Config:
    """Return the config with every term of the loss that it may have, a moving average, and the
    metrics of layers.

    What a config leaves out would not be compared.
    """
    more: dict[str, Any] = {
        "optimizer.ema": EmaConfig(decay=EMA_DECAY),
        "train.z_loss": Z_LOSS,
        "metrics.layers": "all",
    }
    if experts_in(cfg.model):
        more |= {"train.balance_loss": BALANCE_LOSS, "train.router_z_loss": ROUTER_Z_LOSS}
    if cfg.model.mup:
        # By default feed-forwards are wider by the same ratio as the model, which hides its place.
        base = d_ff(cfg.model) / (2 * cfg.model.width_multiplier)
        more["model.mup.base_d_ff"] = max(round(base), 1)
    one = ParallelConfig(data=1)
    check(dataclasses.replace(cfg, parallel=one))  # what follows is then refused for what is added
    for path, value in more.items():
        unset = value_of(cfg, path) in (None, 0, "none")
        with_it = replace(cfg, **{path: value}) if unset else cfg
        try:
            check(dataclasses.replace(with_it, parallel=one))
        except ConfigError:
            continue  # what else the config has refuses it
        cfg = with_it
    return cfg


def with_clipping(cfg: Config, norm: float) -> Config:
    """Return the config with clipping at half of a norm, and an eps for gradients of that size.

    Args:     norm: of the first gradient.
    """
    return steady(replace(cfg, **{"optimizer.clip_norm": norm / 2}), norm / 2)


#: The eps of `steady`, relative to the root mean square of all gradients.
STEADY_EPS = 0.02


def steady(cfg: Config, norm: float = 1.0) -> Config:
    """Return the config with a larger eps, so that Adam's update is as continuous as the model.

    If eps is below the rounding error of gradients, an element whose gradient is only rounding
    error moves by up to a full learning rate in either direction. The loss is not linear, so this
    changes all gradients of the next step: by a hundred times the rounding error.

    Args:     norm: of the gradients.
    """
    eps = STEADY_EPS * norm / math.sqrt(count(trainable_specs(cfg)))
    return replace(cfg, **{"optimizer.eps": max(cfg.optimizer.eps, eps)})


#: The least eps of the norms of a shrunk model with recurrent layers. Their norms divide by the
#: length of what a recurrence returned, often near 0 in a small model: with an eps of 1e-5, two
#: orders of the same sums differ by 2e-5 on one device.
RECURRENT_EPS = 1e-2

#: The longest pattern of layers that a shrunk model keeps.
MOST_KINDS = 8


def shrink(cfg: Config, meshes: Sequence[ParallelConfig]) -> Config:
    """Return a small model of the same kind, with sizes that all meshes divide.

    Its components say how they get small (`Component.shrunk`). Keeps the numbers of layers that
    meshes give to stages, at least two layers of each kind, whole periods (`pattern`), and the
    variance of the output of a matrix. The learning rate starts at its peak, so that a few steps
    change the weights.
    """
    every = lambda ways: math.lcm(*map(ways, meshes))  # noqa: E731
    up = lambda size, of: -(-size // of) * of  # noqa: E731
    m = cfg.model
    d_model = up(min(m.d_model, 64), every(lambda p: p.data * p.expert * p.sequence))
    seq_len = up(32, every(lambda p: p.sequence * p.tensor * 2))
    sizes = SmallSizes.of(m, d_model, seq_len / cfg.data.seq_len, list(meshes))
    period = pattern(m)
    leading = [layer for layer in dict.fromkeys(m.layers[: m.repetition.start]) for _ in range(2)]
    given = [
        sum(layers_per_chunk(dataclasses.replace(cfg, parallel=p)))
        for p in meshes
        if p.layers_per_stage
    ]
    stages = every(lambda p: p.pipeline * p.virtual_stages)
    once = any(period.count(layer) == 1 for layer in period)
    number = max(given, default=up(len(period) * (1 + once), stages * len(period)))
    layers = [*leading, *itertools.islice(itertools.cycle(period), number)]
    small = m.with_layers([layer.shrunk(sizes) for layer in layers])
    values: dict[str, Any] = {"model": small, "model.d_model": d_model}
    values |= _of_run(cfg, meshes, d_model, seq_len)
    if m.recurrent:
        values["model.norm.eps"] = max(m.norm.eps, RECURRENT_EPS)
    if m.max_positions:
        values["model.max_positions"] = up(seq_len, every(lambda p: p.tensor * p.pipeline))
    values |= _base_model(m, dataclasses.replace(small, d_model=d_model))
    return _adapted(replace(without_schedules(cfg), **values))


def pattern(m: Model) -> tuple[Layer, ...]:
    """Return the layers that a small model repeats: the period, with one of those in a row.

    Of a long one, the start that has all of its layers. Modules of multi-token prediction are as
    the last layer, with which it then ends.
    """
    start, n = m.repetition
    period = tuple(layer for layer, _ in itertools.groupby(m.layers[start : start + n]))
    if len(period) > MOST_KINDS:
        period = period[: max(map(period.index, period)) + 1]
    if m.mtp_depth:
        end = len(period) - period[::-1].index(m.layers[-1])
        period = period[end:] + period[:end]
    return period


def _of_run(
    cfg: Config, meshes: Sequence[ParallelConfig], d_model: int, seq_len: int
) -> dict[str, Any]:
    """Return the fields beside those of layers."""
    every = lambda ways: math.lcm(*map(ways, meshes))  # noqa: E731
    up = lambda size, of: -(-size // of) * of  # noqa: E731
    rows = lambda p: p.replica * p.data * p.expert * p.num_microbatches * p.row_groups  # noqa: E731
    return {
        "model.vocab_size": up(128, every(lambda p: p.tensor * p.pipeline)),
        "model.init_std": cfg.model.init_std * math.sqrt(cfg.model.d_model / d_model),
        "data.seq_len": seq_len,
        "train.global_batch_size": up(8, every(rows)),
        "optimizer.warmup_steps": 0,
        "optimizer.warmup_fraction": 0.0,
    }


def _base_model(m: Model, small: Model) -> dict[str, Any]:
    """Return the sizes of µP's base model, with the ratios to those of the model."""
    if m.mup is None:
        return {}
    sizes = {
        "base_width": (m.mup.base_width, small.d_model / m.d_model),
        "base_d_ff": (m.mup.base_d_ff, d_ff(small) / d_ff(m)),
        "base_head_dim": (m.mup.base_head_dim, head_dim(small) / head_dim(m)),
        "base_depth": (m.mup.base_depth, small.num_layers / m.num_layers),
    }
    return {
        f"model.mup.{name}": max(round(size * smaller), 1)
        for name, (size, smaller) in sizes.items()
        if size is not None
    }


def _adapted(cfg: Config) -> Config:
    """Return the config with adapters that fit their matrices, and the factor of the config."""
    lora = cfg.lora
    if lora is None:
        return cfg
    sides = (least_side(cfg.model, target) for target in lora.targets)
    rank = min(lora.rank, *sides)
    return replace(cfg, **{"lora.rank": rank, "lora.alpha": lora.alpha * rank / lora.rank})
