"""The teacher of a distillation: the model of another run, frozen, on the mesh of the student.

Before each step, a program of its own computes the teacher's likeliest next tokens of the batch.
The step receives them beside the tokens, and knows nothing of the teacher's model. With
`distill.cache`, they come from files (`keeping.py`), and there is no teacher.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar import checkpoint
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.layout.teacher import FIELD, config_of_teacher
from jaxpar.config.serialize import to_json
from jaxpar.data.teacher_cache.cache import About
from jaxpar.execution.decisions import execution_of
from jaxpar.sharding.batch import Batch
from jaxpar.step import adapters
from jaxpar.step.forward import make_teacher_step
from jaxpar.stores.models import run_at


class Teacher:
    """A teacher on a mesh. `attach` gives its likeliest tokens to a batch."""

    def __init__(self, cfg: Config, mesh: Mesh, max_segments: int):
        """Find the teacher's checkpoint and check its model; reads no weight.

        Args:     cfg: of the student, resolved for the mesh.
        Raises:   ConfigError if there is no such run, or its model does not fit the student.
        """
        self._mesh, folder = mesh, run_at(FIELD, cfg.distill.teacher)
        if folder is None or not (folder.is_dir() and checkpoint.saved_steps(folder)):
            rule, fix = "is not a run with a checkpoint", "use the folder of a run"
            raise ConfigError(FIELD, cfg.distill.teacher, rule, fix)
        self.step, there = _found(folder)
        self.folder, self._lora, self._named = folder, there.lora, cfg.distill.teacher
        self.cfg = config_of_teacher(cfg, there)
        d, self._top_k = cfg.distill, cfg.distill.top_k
        self._program = make_teacher_step(
            self.cfg, mesh, d.top_k, d.temperature, max_segments, execution_of(self.cfg)
        )
        self._params: Any = None

    def __str__(self) -> str:
        return f"{self._named}, step {self.step}"

    def load(self) -> None:
        """Read the teacher's weights, merged with its adapters."""
        there = replace(self.cfg, lora=self._lora)
        params = checkpoint.restore_params(self.folder, there, self._mesh, self.step)
        self._params = adapters.merge(params, there, self._mesh)

    def attach(self, batch: Batch) -> Batch:
        """Add the teacher's likeliest tokens to a batch, which may be abstract."""
        if isinstance(batch.tokens, jax.ShapeDtypeStruct):
            shape = (*batch.tokens.shape, self._top_k)
            of = lambda dtype: batch.tokens.update(shape=shape, dtype=dtype)  # noqa: E731
            return dataclasses.replace(
                batch, teacher_ids=of(jnp.int32), teacher_scores=of(jnp.float32)
            )
        ids, scores = self._program(self._params, batch)
        return dataclasses.replace(batch, teacher_ids=ids, teacher_scores=scores)


def _found(folder: Path) -> tuple[int, Config]:
    """Return the step and the config of the latest intact checkpoint."""
    load = lambda step: (step, checkpoint.load_config(folder, step))  # noqa: E731
    return checkpoint.read_whole(folder, None, load)


def identity_of(folder: Path) -> str:
    """Return a hash of a teacher's model and weights."""
    step, there = _found(folder)
    saved = checkpoint.read_saved(folder, step)
    weights = {k: v for k, v in sorted(saved.fingerprints.items()) if k.startswith("params/")}
    model = json.loads(to_json(there))["model"]
    return hashlib.sha256(json.dumps([weights, model]).encode()).hexdigest()


def check_kept(cfg: Config, about: About) -> str:
    """Check that a cache is of the teacher that a config names, if the teacher is there.

    Returns:  the teacher, for the log.
    Raises:   ConfigError if it is another one.
    """
    folder = run_at(FIELD, cfg.distill.teacher)
    if folder is None or not (folder.is_dir() and checkpoint.saved_steps(folder)):
        return f"{about.teacher_name}, by {cfg.distill.cache} alone"
    if identity_of(folder) != about.teacher:
        rule = f"has other weights than {about.teacher_name}, which {cfg.distill.cache} is of"
        fix = "use that teacher, or keep what this one says in another folder"
        raise ConfigError(FIELD, cfg.distill.teacher, rule, fix)
    return f"{about.teacher_name}, by {cfg.distill.cache}"
