"""A config at another width."""

import dataclasses
import math
from typing import Any

from jaxpar.config import Config, ConfigError, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from jaxpar.config.layout.layer_kinds import is_recurrent
from jaxpar.verification.small_config import float32


def prepared(cfg: Config, sequences: int, length: int) -> Config:
    """Return the config for the check: its model and its update rule at the peak of the rate.

    In float32, on one device, for packed batches of `sequences` times `length` tokens.

    Raises:   ConfigError for a model that cannot be widened, or a run that trains other weights.
    """
    for path, is_set in (
        ("lora.rank", cfg.lora.rank > 0),
        ("dpo.beta", cfg.dpo.beta > 0),
        ("distill.teacher", bool(cfg.distill.teacher)),
        ("model.layer_pattern", is_recurrent(cfg.model)),
    ):
        if is_set:
            rule = "is not part of the check, which trains all weights of layers with attention"
            raise ConfigError(path, "set", rule, "use a config without it")
    rate = {"schedule": "constant", "warmup_steps": 0, "warmup_fraction": 0.0}
    rate |= {"decay_steps": 0, "schedule_by": "steps", "offload": False}
    rate |= {"schedule_as_input": False}
    made = Config(
        model=cfg.model,
        optimizer=dataclasses.replace(cfg.optimizer.averaging(False), **rate),  # type: ignore[arg-type]
        train=TrainConfig(global_batch_size=sequences, seed=cfg.train.seed),
        data=DataConfig(seq_len=length, document_mask=cfg.data.document_mask),
        parallel=ParallelConfig(data=1, layer_loop=cfg.parallel.layer_loop),
    )
    return float32(made)


def widened(cfg: Config, width: int) -> Config:
    """Return the config with `d_model` = width, and all widths of a layer in proportion.

    More heads have the width of the model's. With `mup.base_head_dim`, wider heads are as many.

    Raises:   ConfigError for a width that is not in proportion to whole numbers.
    """
    m = cfg.model
    names = ["d_ff"] + ["dense_d_ff"] * (m.dense_d_ff is not None)
    grows_heads = m.mup is None or m.mup.base_head_dim is None
    names += ["num_heads", "num_kv_heads"] if grows_heads else ["head_dim"]
    least = m.d_model // math.gcd(m.d_model, *(getattr(m, name) for name in names))
    if width < 1 or width % least:
        parts = ", ".join(f"{name} {getattr(m, name)}" for name in ("d_model", *names))
        rule = f"must be a multiple of {least}, so that {parts} grow in proportion"
        fix = f"use --widths {','.join(str(n * least) for n in _doublings(m, least))}"
        raise ConfigError("--widths", width, rule, fix)
    sizes: dict[str, Any] = {name: getattr(m, name) * width // m.d_model for name in names}
    return dataclasses.replace(cfg, model=dataclasses.replace(m, d_model=width, **sizes))


def _doublings(m: ModelConfig, least: int) -> list[int]:
    first = -(-(m.d_model // 2) // least)
    return [first, 2 * first, 4 * first]
