"""Distillation: learn a teacher's distribution of the next token, beside the token itself.

    loss = (1 - weight) CE + weight temperature^2 KL(teacher || student)    mean over labeled tokens

Both distributions are at the temperature. The teacher gives its k likeliest tokens; the rest of the
vocabulary is one more outcome, the tail, with what is left of the probability:

    KL = sum over the k of p log(p / q)  +  p_tail log(p_tail / q_tail)

With k the size of the vocabulary this is the divergence of the whole distributions. Otherwise it is
a lower bound of it, whose minimum is still the teacher's distribution, unlike that of the k tokens
alone.

Source:   Hinton et al. 2015 (1503.02531), section 2.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from jaxpar.components.ranges import Example, Positive, Reals
from jaxpar.config.metrics import Metric
from jaxpar.objectives.objective import Objective

if TYPE_CHECKING:
    import jax
    import numpy as np

    from jaxpar.config import Config
    from jaxpar.config.incompatible import Incompatible
    from jaxpar.objectives.head import Head, Sums, Tree
    from jaxpar.sharding.batch import Batch

FIELD, CACHE = "distill.teacher", "distill.cache"

#: In `Batch.extra`: int32 and float32 [B, T, k], the teacher's likeliest next tokens and their log
#: probabilities.
IDS, SCORES = "teacher_ids", "teacher_scores"


@dataclass(frozen=True, kw_only=True)
class Distill(Objective):
    """Distillation from a teacher model."""

    section = "distill"
    metrics: ClassVar[dict[str, Metric]] = {
        "distill_loss": Metric("training", "nats per token", "divergence from the teacher"),
    }
    evaluates = False
    recomputed = 12  # two distributions
    paths, addresses = ("teacher", "cache"), ("teacher",)

    teacher: Annotated[str, Example("runs/teacher")]
    """Run whose model is the teacher, with the same tokenizer."""
    cache: str = ""
    """Folder of what the teacher says of the training data, which `python -m jaxpar.data teacher`
    writes: training then needs no teacher in memory. Empty: the teacher runs before each step."""
    weight: Annotated[float, Reals(0, 1, above=True)] = 0.5
    """Share of the divergence from the teacher in the loss. The rest is the cross entropy."""
    temperature: Positive = 1.0
    """Temperature of both distributions. Above 1, unlikely tokens count for more."""
    top_k: int = 64
    """Tokens of the teacher that are compared one by one, at each position. The others count as
    one. model.vocab_size compares all, which takes as much memory as the logits."""

    def check(self, cfg: "Config", path: str) -> None:
        from jaxpar.config import default_of, flag, require
        from jaxpar.config.fields import turning_off

        ways = flag(FIELD, default_of(FIELD)), *turning_off(FIELD)
        require(bool(self.teacher), cfg, FIELD, "must name the run of a teacher", *ways)
        path, vocab = "distill.top_k", cfg.model.vocab_size
        rule = f"must be from 1 to model.vocab_size = {vocab}"
        require(1 <= self.top_k <= vocab, cfg, path, rule, flag(path, min(64, vocab)))

    @classmethod
    def incompatible(cls) -> "tuple[Incompatible, ...]":
        from jaxpar.config import incompatible as known
        from jaxpar.config.condition import changed

        no_term = "the loss of a student has no such term"
        excluded = {
            known.Z_LOSS: no_term,
            known.Z_LOSS_SCHEDULE: no_term,
            known.MTP: no_term,
            known.BATCHES: "the teacher's steps have one size",
            known.LENGTHS: "the teacher's steps have one size",
        }
        why = "the cache is of the sequences of a dataset"
        return (
            *cls.excludes(excluded),
            known.Incompatible(known.SOURCE, changed(CACHE), why),
            known.Incompatible(cls.is_set(), known.DILOCO, "replicas would share the teacher"),
        )

    def head(self, top: "Tree", x: "jax.Array", mb: "Batch", h: "Head") -> "Sums":
        from jaxpar.features.distillation.loss import head

        return head(self, top, x, mb, h.cfg)

    def report(self, mean: "jax.Array") -> "dict[str, jax.Array]":
        return (
            dict(zip(("loss", *self.metrics), mean, strict=True)) if mean.ndim else {"loss": mean}
        )

    def plain(
        self, logits: "jax.Array", batch: "Batch", cfg: "Config"
    ) -> "tuple[jax.Array, jax.Array]":
        """As `Objective.plain`: the divergence compares as many outcomes as the teacher names, and
        the tail; "loss" is the cross entropy alone."""
        import jax
        import jax.numpy as jnp

        from jaxpar.sharding.batch import IGNORED

        labeled, T = batch.labels != IGNORED, self.temperature
        scores, index = jax.nn.log_softmax(logits), jnp.maximum(batch.labels, 0)[..., None]
        at_label = jnp.take_along_axis(scores, index, -1)[..., 0]
        q = jnp.take_along_axis(jax.nn.softmax(logits / T), batch.extra[IDS], axis=-1)
        p = jnp.exp(batch.extra[SCORES])
        kl = jnp.sum(p * (batch.extra[SCORES] - jnp.log(q)), axis=-1)
        if p.shape[-1] < logits.shape[-1]:
            of_p, of_q = 1 - jnp.sum(p, axis=-1), 1 - jnp.sum(q, axis=-1)
            kl += of_p * jnp.log(of_p / of_q)
        mean = lambda a: jnp.sum(jnp.where(labeled, a, 0.0)) / jnp.sum(labeled)  # noqa: E731
        ce = -mean(at_label)
        return (1 - self.weight) * ce + self.weight * T**2 * mean(kl), ce

    def random_extra(self, cfg: "Config", rng: "np.random.Generator") -> "dict[str, np.ndarray]":
        import numpy as np

        shape = (cfg.train.global_batch_size, cfg.data.seq_len, cfg.model.vocab_size)
        logits = 2 * rng.standard_normal(shape)
        scores = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
        ids = np.argsort(-scores, axis=-1)[..., : self.top_k].astype(np.int32)
        likeliest = np.take_along_axis(scores, ids, axis=-1).astype(np.float32)
        return {IDS: ids, SCORES: likeliest}

    def batch_extra(self, cfg: "Config") -> dict[str, tuple[tuple[int, ...], str]]:
        return {IDS: ((self.top_k,), "int32"), SCORES: ((self.top_k,), "float32")}

    def loader(self, split: str) -> type | None:
        from jaxpar.data.formats.meta import TRAIN

        if not self.cache or split != TRAIN:
            return None
        from jaxpar.features.distillation.cache import TeacherCacheLoader

        return TeacherCacheLoader

    def frozen_model(self, cfg: "Config") -> "Config | None":
        """Return the config of the teacher; None with `cache`, and if its folder is no run, which
        `check_plan` refuses. Raises:   ConfigError as `config_of_teacher`."""
        from jaxpar.config import ConfigError

        if self.cache:
            return None
        try:
            there = self._config_there()
        except ConfigError:
            return None
        return self.config_of_teacher(cfg, there)

    def check_plan(self, cfg: "Config") -> None:
        from jaxpar.config import ConfigError

        if self.cache:
            return
        try:
            self._config_there()
        except ConfigError as error:
            rule = f"has a model that the plan cannot count: {error.rule}"
            fix = "use the folder of a run, or --distill.cache to plan without it"
            raise ConfigError(FIELD, self.teacher, rule, fix) from error

    def _config_there(self) -> "Config":
        """Read the config of the teacher's run. Raises:   ConfigError."""
        from jaxpar.config import ConfigError
        from jaxpar.config.config_file import load_run
        from jaxpar.stores.reading import run_at

        folder = run_at(FIELD, self.teacher, checkpoints=False)
        if folder is None:
            raise ConfigError(FIELD, self.teacher, "contains no run", "use the run.dir of a run")
        return load_run(str(folder))

    def config_of_teacher(self, student: "Config", there: "Config") -> "Config":
        """Return the config with which a teacher runs: its own model, and all else of the student.

        Args:
            student: resolved.
            there: of the teacher's run.
        Raises:   ConfigError if the vocabularies differ, or the mesh does not divide the teacher.
        """
        from jaxpar.config import ConfigError, replace, value_of
        from jaxpar.config.validate import resolve

        path = "model.vocab_size"
        if value_of(there, path) != value_of(student, path):
            rule = f"has a model of {value_of(there, path):,} tokens, and the student's has "
            rule += f"{value_of(student, path):,}"
            raise ConfigError(FIELD, self.teacher, rule, "use models of one tokenizer")
        p = dataclasses.replace(
            student.parallel, layers_per_stage=(), remat_layers=(), layer_loop="unroll"
        )
        compute = dataclasses.replace(there.compute, dtype=student.compute.dtype)
        alone = replace(student, **{self.section: None})
        cfg = dataclasses.replace(alone, model=there.model, compute=compute, lora=None, parallel=p)
        try:
            devices = p.pipeline * p.replica * p.data * p.expert * p.sequence * p.tensor
            return resolve(cfg, devices)
        except ConfigError as error:
            rule = f"has a model that this mesh cannot run: {error.field} {error.rule}"
            fix = "use another mesh, or another teacher"
            raise ConfigError(FIELD, self.teacher, rule, fix) from error

    @property
    def in_files(self) -> bool:
        return bool(self.cache)

    def weights(self, cfg: "Config", recorded: Any) -> dict[str, Any]:
        from jaxpar.features.distillation.teacher import choose

        return {FIELD: choose(self, cfg, recorded.get(FIELD))}

    def prepare(
        self, cfg: "Config", mesh: Any, loader: Any, max_segments: int, weights_from: Any
    ) -> Any:
        from jaxpar.features.distillation.teacher import Teacher, check_cache

        if self.cache:
            return check_cache(self, loader.taught.about, weights_from[FIELD])
        return Teacher(self, cfg, mesh, max_segments, weights_from[FIELD])

    @classmethod
    def data_commands(cls) -> dict[str, tuple[type, Callable[[Any], None]]]:
        from jaxpar.features.distillation.command import TeacherOptions, run

        return {"teacher": (TeacherOptions, run)}


SECTION = Distill
