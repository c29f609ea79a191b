"""The teacher of a distillation: the model of another run, on the mesh of the student.

Before each step, a separate program computes the teacher's likeliest next tokens of the batch.
The step receives them beside the tokens, and knows nothing of the teacher's model. With
`distill.cache`, they come from files (`cache.py`), and there is no teacher.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpar.checkpoint.loading import restore_params
from jaxpar.checkpoint.saved import saved_config, saved_steps
from jaxpar.config import Config, ConfigError, flag, replace
from jaxpar.config.schema.features import objective_in
from jaxpar.execution.decisions import execution_of
from jaxpar.features.distillation import CACHE, FIELD, IDS, SCORES, Distill
from jaxpar.features.distillation.cache import (
    ABOUT_FILE,
    SHARD_BYTES,
    About,
    TeacherFile,
    about_to_json,
    check_fits,
    missing_shards,
    read_about,
    shard_path,
    size_of,
)
from jaxpar.features.distillation.loss import likeliest
from jaxpar.parallel.context import order_of
from jaxpar.runtime.files import atomic
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.stages import stage
from jaxpar.sharding.batch import Batch
from jaxpar.step import adapters
from jaxpar.step.forward import make_token_step
from jaxpar.step.state import TrainState
from jaxpar.training import chosen as weights
from jaxpar.training.chosen import (
    Chosen,
    folder_of,
    found_again,
    newest,
    of_first_process,
    process,
    run_of,
    step_with,
)
from jaxpar.training.run import Run
from jaxpar.training.supplement import Supplement


class Teacher(Supplement):
    """A teacher on a mesh. `attach` gives its likeliest tokens to a batch."""

    name = "teacher"

    def __init__(self, d: Distill, cfg: Config, mesh: Mesh, max_segments: int, chosen: Chosen):
        """Check the teacher's model; reads no weight.

        Args:     cfg: of the student, resolved for the mesh. chosen: the teacher's checkpoint.
        Raises:   ConfigError if its model does not fit the student; as `folder_of`.
        """
        self._mesh, self.chosen, self._folder = mesh, chosen, folder_of(FIELD, chosen)
        there = saved_config(self._folder, chosen.step)
        self._lora = there.lora
        self.cfg = d.config_of_teacher(cfg, there)

        def head(top: Any, x: jax.Array, mb: Batch) -> tuple[jax.Array, jax.Array]:
            return likeliest(top, x, self.cfg, d.top_k, d.temperature)

        self._program = make_token_step(self.cfg, mesh, head, max_segments, execution_of(self.cfg))
        self._params: Any = None

    def __str__(self) -> str:
        return str(self.chosen)

    def load(self, run: Run | None = None, initial: TrainState | None = None) -> None:
        """Read the teacher's weights, merged with its adapters."""
        there = replace(self.cfg, lora=self._lora)
        with stage("reading the teacher"):
            params = restore_params(self._folder, there, self._mesh, self.chosen.step)
            self._params = adapters.merge(params, there, self._mesh)
        log(f"teacher    {self}")

    def attach(self, batch: Batch) -> Batch:
        """Add the teacher's likeliest tokens to a batch."""
        ids, scores = self._program(self._params, batch)
        return dataclasses.replace(batch, extra=batch.extra | {IDS: ids, SCORES: scores})


def check_cache(d: Distill, about: About, chosen: Chosen) -> None:
    """Check that a cache, which is in place of a teacher, is of the chosen weights."""
    if about.teacher != chosen.weights:
        rule = f"is of other weights in {process()} than in process 0"
        raise ConfigError(CACHE, d.cache, rule, "use one folder")
    log(f"teacher    {about.teacher_name}, by {d.cache}")


def choose(d: Distill, cfg: Config, recorded: Chosen | None) -> Chosen:
    """Choose the teacher of a distillation, live or in a cache.

    Args:     recorded: the one that the run has learned from so far.
    """
    named = d.teacher
    if not d.cache and recorded is not None:
        return found_again(FIELD, cfg, recorded)
    if not d.cache:
        return newest(FIELD, named, published=False)
    about = read_about(Path(d.cache))
    if about is None:
        return Chosen(named)  # `TeacherCache` refuses it
    if recorded is not None and recorded.weights != about.teacher:
        rule = f"is of {about.teacher_name}, and the run has learned from other weights so far, "
        rule += str(recorded)
        fix = f"use {flag(CACHE, '')} and that teacher, or a cache of what it says"
        raise ConfigError(CACHE, d.cache, rule, fix)
    folder = run_of(FIELD, named, None)
    steps = saved_steps(folder) if folder is not None else []
    if recorded is not None or not steps:  # the cache is enough
        return Chosen(named, None if recorded is None else recorded.step, about.teacher)
    step = step_with(folder, about.teacher)
    if step is not None:
        return Chosen(named, step, about.teacher)
    rule = f"has other weights than {about.teacher_name}, which {d.cache} is of"
    fix = "use that teacher, or keep what this one says in another folder"
    raise ConfigError(FIELD, named, rule, fix)


def choose_to_keep(cfg: Config, kept: About | None) -> dict[str, Chosen]:
    """Choose the teacher of a cache: the one that it has begun with, or the newest.

    Args:     cfg: without `distill.cache`. kept: of the cache, None for a new one.
    """
    chosen = weights.choose(cfg, None)
    if kept is not None and FIELD in chosen:
        named = chosen[FIELD].run
        step = step_with(run_of(FIELD, named, None), kept.teacher)
        if step is not None:
            chosen[FIELD] = Chosen(named, step, kept.teacher)
    return chosen


# ---------------------------------- What a teacher says of the training data, written into files


def keep(cfg: Config, log: Callable[[str], None] = peers.log) -> None:
    """Run the teacher of a config over each sequence of its training data, once.

    Files that are there are kept: a command that was stopped continues. All processes call it, and
    see the same folder.

    Raises:   ConfigError as `Run`; if there is no teacher; if `distill.cache` is empty, or has
              files of something else.
    """
    if not isinstance(d := objective_in(cfg), Distill):
        rule = "is None: there is no teacher"
        raise ConfigError("distill", None, rule, "use --distill.teacher runs/teacher")
    if not d.cache:
        rule = "is empty: there is no folder for what the teacher says"
        raise ConfigError(CACHE, "", rule, "use --distill.cache data/teacher")
    folder, seconds = Path(d.cache), cfg.cluster.slow_seconds or 1e6
    with stage("opening the data and checking the run"):
        live = replace(cfg, **{CACHE: ""})
        chosen = of_first_process(lambda: choose_to_keep(live, read_about(folder)), seconds)
        make = lambda: Run.open(live, in_folder=False, chosen=chosen)  # noqa: E731
        run = peers.all_or_none("checks", seconds, make)
    teacher = run.supplement
    assert isinstance(teacher, Teacher)
    about = peers.all_or_none("cache", seconds, lambda: _about(run, d, teacher, folder))
    missing = missing_shards(folder, about)
    total = sum(about.rows_of(*shard) for shard in missing) * about.seq_len
    size = sum(size_of(about, *shard) for shard in missing)
    log(f"to keep    {total:,} tokens, {size / 1e9:,.2f} GB in {len(missing):,} files of {folder}")
    peers.check_same("list of files", lambda: str(missing), seconds)
    if not missing:
        return
    teacher.load()
    done, began = 0, time.perf_counter()
    for number, shard in enumerate(missing, start=1):
        _keep_shard(run, teacher, about, folder, shard, f"shard {number}", seconds)
        done += about.rows_of(*shard) * about.seq_len
        rate = done / (time.perf_counter() - began)
        left = (total - done) / rate / 60
        log(f"kept       {done:,} of {total:,} tokens, {rate:,.0f} tok/s, {left:,.0f} min left")


def _about(run: Run, d: Distill, teacher: Teacher, folder: Path) -> About:
    """Return what the folder is or becomes, and begin it in process 0.

    Raises:   ConfigError if it is of something else.
    """
    cfg, loader = run.cfg, run.loader
    batch = cfg.train.global_batch_size
    each = batch * cfg.data.seq_len * d.top_k * 8
    sources = [source.dataset.fingerprint for source in loader.sources]
    wanted = About(
        teacher=teacher.chosen.weights,
        teacher_name=str(teacher),
        sources=tuple(sources),
        sequences=tuple(loader.sequences_per_epoch),
        seq_len=cfg.data.seq_len,
        document_mask=cfg.data.document_mask,
        vocab_size=cfg.model.vocab_size,
        top_k=d.top_k,
        temperature=d.temperature,
        rows=batch * max(SHARD_BYTES // each, 1),
    )
    found = read_about(folder)
    if found is None:
        if peers.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            atomic.write(folder / ABOUT_FILE, about_to_json(wanted).encode())
        return wanted
    check_fits(found, d, cfg, sources, loader.sequences_per_epoch)
    if (found.teacher, found.top_k) != (wanted.teacher, wanted.top_k):
        rule = f"has the {found.top_k} likeliest tokens of {found.teacher_name}, not the "
        rule += f"{wanted.top_k} of {wanted.teacher_name}"
        raise ConfigError(CACHE, str(folder), rule, "use another folder")
    return found


def _keep_shard(
    run: Run,
    teacher: Teacher,
    about: About,
    folder: Path,
    shard: tuple[int, int],
    name: str,
    seconds: float,
) -> None:
    """Write a shard: each process the rows of its devices, and process 0 the checksums."""
    source, number = shard
    target = shard_path(folder, source, number)
    partial = target.with_name(f"{target.name}.partial")

    def begin() -> None:
        if peers.rank() == 0:
            with partial.open("wb") as file:
                file.truncate(size_of(about, source, number))

    def end() -> None:
        if peers.rank() == 0:
            opened = TeacherFile(about, source, number, partial, "r+")
            for row in range(len(opened.checks)):
                opened.checks[row] = opened.check_of(row)
            opened.checks.flush()
            atomic.publish(partial, target)

    peers.all_or_none(f"{name} begins", seconds, begin)
    opened = TeacherFile(about, source, number, partial, "r+")
    rows, size = about.rows_of(source, number), run.cfg.train.global_batch_size
    for first in range(0, rows, size):
        here = np.minimum(np.arange(first, first + size), rows - 1)  # the last one is repeated
        batch = run.loader.sequences(source, number * about.rows + here)
        _write_rows(opened, teacher.attach(batch), run.cfg, first, rows)
    opened.ids.flush()
    opened.scores.flush()
    peers.all_or_none(f"{name} is written", seconds, lambda: None)
    peers.all_or_none(f"{name} ends", seconds, end)


def _write_rows(shard: TeacherFile, batch: Batch, cfg: Config, first: int, rows: int) -> None:
    """Write what this process has of a batch, in the order of the text."""
    order = order_of(cfg)
    places = np.arange(cfg.data.seq_len) if order is None else order
    for kept, given in ((shard.ids, batch.extra[IDS]), (shard.scores, batch.extra[SCORES])):
        for piece in given.addressable_shards:
            if piece.replica_id:
                continue
            begin, end, _ = piece.index[0].indices(given.shape[0])
            end = min(end, rows - first)
            if begin < end:
                values = np.asarray(piece.data)[: end - begin]
                kept[first + begin : first + end, places[piece.index[1]]] = values
