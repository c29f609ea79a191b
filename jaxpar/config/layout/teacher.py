"""The config with which the teacher of a distillation runs, on the mesh of the student."""

import dataclasses

from jaxpar.config import Config, ConfigError, value_of
from jaxpar.config.validate import resolve

FIELD = "distill.teacher"


def config_of_teacher(student: Config, there: Config) -> Config:
    """Return the config with which a teacher runs: its own model, and all else of the student.

    Args:     student: resolved. there: of the teacher's run.
    Raises:   ConfigError if the vocabularies differ, or the mesh does not divide the teacher.
    """
    path, named = "model.vocab_size", value_of(student, FIELD)
    if value_of(there, path) != value_of(student, path):
        rule = f"has a model of {value_of(there, path):,} tokens, and the student's has "
        rule += f"{value_of(student, path):,}"
        raise ConfigError(FIELD, named, rule, "use models of one tokenizer")
    parallel = dataclasses.replace(
        student.parallel, layers_per_stage=(), remat_layers=(), layer_loop="unroll"
    )
    compute = dataclasses.replace(there.compute, dtype=student.compute.dtype)
    cfg = dataclasses.replace(
        student,
        model=there.model,
        compute=compute,
        lora=None,
        parallel=parallel,
        distill=None,
    )
    try:
        return resolve(cfg, _devices(student))
    except ConfigError as error:
        rule = f"has a model that this mesh cannot run: {error.field} {error.rule}"
        fix = "use another mesh, or another teacher"
        raise ConfigError(FIELD, named, rule, fix) from error


def _devices(cfg: Config) -> int:
    p = cfg.parallel
    return p.pipeline * p.replica * p.data * p.expert * p.sequence * p.tensor
