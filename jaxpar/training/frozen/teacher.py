"""The teacher of a distillation: the model of another run, frozen, on the mesh of the student.

Before each step, a program of its own computes the teacher's likeliest next tokens of the batch.
The step receives them beside the tokens, and knows nothing of the teacher's model. With
`distill.cache`, they come from files (`keeping.py`), and there is no teacher.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar import checkpoint
from jaxpar.config import Config, replace
from jaxpar.config.layout.teacher import FIELD, config_of_teacher
from jaxpar.execution.decisions import execution_of
from jaxpar.sharding.batch import Batch
from jaxpar.step import adapters
from jaxpar.step.forward import make_teacher_step
from jaxpar.training.frozen.chosen import Chosen, folder_of


class Teacher:
    """A teacher on a mesh. `attach` gives its likeliest tokens to a batch."""

    def __init__(self, cfg: Config, mesh: Mesh, max_segments: int, chosen: Chosen):
        """Check the teacher's model; reads no weight.

        Args:     cfg: of the student, resolved for the mesh. chosen: the teacher's checkpoint.
        Raises:   ConfigError if its model does not fit the student; as `folder_of`.
        """
        self._mesh, self.chosen, self._folder = mesh, chosen, folder_of(FIELD, chosen)
        there = checkpoint.load_config(self._folder, chosen.step)
        self._lora = there.lora
        self.cfg = config_of_teacher(cfg, there)
        d, self._top_k = cfg.distill, cfg.distill.top_k
        self._program = make_teacher_step(
            self.cfg, mesh, d.top_k, d.temperature, max_segments, execution_of(self.cfg)
        )
        self._params: Any = None

    def __str__(self) -> str:
        return str(self.chosen)

    def load(self) -> None:
        """Read the teacher's weights, merged with its adapters."""
        there = replace(self.cfg, lora=self._lora)
        params = checkpoint.restore_params(self._folder, there, self._mesh, self.chosen.step)
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
