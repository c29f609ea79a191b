"""Predicts what a teacher in memory adds to a step: its weights, and a forward pass before it."""

import dataclasses
import functools

from jaxpar.config import Config, ConfigError
from jaxpar.config.config_file import load_run
from jaxpar.config.layout.teacher import FIELD, config_of_teacher
from jaxpar.model.loss import num_chunks
from jaxpar.prediction.memory import MemoryForecast
from jaxpar.prediction.shard import shard_of, state_bytes


@functools.lru_cache(maxsize=4096)
def teacher_of(cfg: Config) -> Config | None:
    """Return the config with which the teacher runs beside a student.

    A forward pass recomputes nothing, so its remat policy is "none".

    Args:     cfg: of the student, resolved.
    Returns:  None without a teacher, with `distill.cache`, and if its folder is no run, which
              `check_teacher` refuses.
    Raises:   ConfigError as `config_of_teacher`.
    """
    if not cfg.distill or cfg.distill.cache:
        return None
    try:
        there = _config_of(cfg.distill.teacher)
    except ConfigError:
        return None
    taught = config_of_teacher(cfg, there)
    return dataclasses.replace(taught, parallel=dataclasses.replace(taught.parallel, remat="none"))


def check_teacher(cfg: Config) -> None:
    """Raise ConfigError if a teacher in memory has an unknown model, and cannot be counted."""
    if not cfg.distill or cfg.distill.cache:
        return
    try:
        _config_of(cfg.distill.teacher)
    except ConfigError as error:
        rule = f"has a model that the plan cannot count: {error.rule}"
        fix = "use the folder of a run, or --distill.cache to plan without it"
        raise ConfigError(FIELD, cfg.distill.teacher, rule, fix) from error


def _config_of(named: str) -> Config:
    """Read the config of the teacher's run. Raises:   ConfigError."""
    from jaxpar.stores.reading import run_at  # a store is read only for a teacher

    folder = run_at(FIELD, named, checkpoints=False)
    if folder is None:
        raise ConfigError(FIELD, named, "contains no run", "use the run.dir of a run")
    return load_run(str(folder))


def weights_of(teacher: Config) -> int:
    """Return the bytes of a teacher's weights on a device."""
    return state_bytes(teacher)[0]


def forward_pass(
    teacher: Config, weights: float, optimizer: float, layer: float, buffers: float
) -> MemoryForecast:
    """Predict the memory of a device during the teacher's forward pass.

    Weights in the compute dtype are as in a step; a layer's values, and a chunk of logits and their
    exponentials in float32, are all that is live besides.

    Args:     weights, optimizer: of student and teacher. layer: bytes per token of a layer's
              values. buffers: of the student, with its batch.
    """
    shard, p, m = shard_of(teacher), teacher.parallel, teacher.model
    n = num_chunks(shard.tokens, shard.vocab, p.loss_chunks)
    gathered = float(shard.stack.everything)
    if p.zero == 3:
        gathered = shard.owned_of(shard.stack) + 2 * shard.gathered(shard.layer)
    return MemoryForecast(
        weights=weights,
        optimizer=optimizer,
        activations=shard.tokens * layer,
        logits=8.0 * shard.tokens / n * shard.vocab,
        gathered=shard.width * (gathered + shard.table),
        gradients=0.0,
        buffers=buffers + 2 * shard.tokens * shard.width * m.d_model / p.tensor,
        moment="teacher",
    )
