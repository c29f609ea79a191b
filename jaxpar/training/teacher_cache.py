"""Keeps what a teacher says of the training data in files: `python -m jaxpar.data teacher`."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxpar.config import Config, ConfigError, present, replace
from jaxpar.data.teacher_cache import (
    ABOUT_FILE,
    FIELD,
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
from jaxpar.parallel.context import order_of
from jaxpar.runtime.files import atomic
from jaxpar.runtime.processes import peers
from jaxpar.runtime.stages import stage
from jaxpar.sharding.batch import Batch
from jaxpar.training.chosen import choose_to_keep, of_first_process
from jaxpar.training.frozen import Teacher
from jaxpar.training.run import Run


def keep(cfg: Config, log: Callable[[str], None] = peers.log) -> None:
    """Run the teacher of a config over each sequence of its training data, once.

    Files that are there are kept: a command that was stopped continues. All processes call it, and
    see the same folder.

    Raises:   ConfigError as `Run`; if there is no teacher; if `distill.cache` is empty, or has
              files of something else.
    """
    if cfg.distill is None:
        rule = "is None: there is no teacher"
        raise ConfigError("distill", None, rule, "use --distill.teacher runs/teacher")
    if not cfg.distill.cache:
        rule = "is empty: there is no folder for what the teacher says"
        raise ConfigError(FIELD, "", rule, "use --distill.cache data/teacher")
    folder, seconds = Path(cfg.distill.cache), cfg.cluster.slow_seconds or 1e6
    with stage("opening the data and checking the run"):
        live = replace(cfg, **{FIELD: ""})
        chosen = of_first_process(lambda: choose_to_keep(live, read_about(folder)), seconds)
        make = lambda: Run.open(live, in_folder=False, chosen=chosen)  # noqa: E731
        run = peers.all_or_none("checks", seconds, make)
    teacher = run.teacher
    assert teacher is not None
    about = peers.all_or_none("cache", seconds, lambda: _about(run, teacher, folder))
    missing = missing_shards(folder, about)
    total = sum(about.rows_of(*shard) for shard in missing) * about.seq_len
    size = sum(size_of(about, *shard) for shard in missing)
    log(f"teacher    {teacher}")
    log(f"to keep    {total:,} tokens, {size / 1e9:,.2f} GB in {len(missing):,} files of {folder}")
    peers.check_same("list of files", lambda: str(missing), seconds)
    if not missing:
        return
    with stage("reading the teacher"):
        teacher.load()
    done, began = 0, time.perf_counter()
    for number, shard in enumerate(missing, start=1):
        _keep_shard(run, teacher, about, folder, shard, f"shard {number}", seconds)
        done += about.rows_of(*shard) * about.seq_len
        rate = done / (time.perf_counter() - began)
        left = (total - done) / rate / 60
        log(f"kept       {done:,} of {total:,} tokens, {rate:,.0f} tok/s, {left:,.0f} min left")


def _about(run: Run, teacher: Teacher, folder: Path) -> About:
    """Return what the folder is or becomes, and begin it in process 0.

    Raises:   ConfigError if it is of something else.
    """
    cfg, loader = run.cfg, run.loader
    d = present(cfg.distill)
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
    check_fits(found, cfg, sources, loader.sequences_per_epoch)
    if (found.teacher, found.top_k) != (wanted.teacher, wanted.top_k):
        rule = f"has the {found.top_k} likeliest tokens of {found.teacher_name}, not the "
        rule += f"{wanted.top_k} of {wanted.teacher_name}"
        raise ConfigError(FIELD, str(folder), rule, "use another folder")
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
    for kept, given in ((shard.ids, batch.teacher_ids), (shard.scores, batch.teacher_scores)):
        for piece in given.addressable_shards:
            if piece.replica_id:
                continue
            begin, end, _ = piece.index[0].indices(given.shape[0])
            end = min(end, rows - first)
            if begin < end:
                values = np.asarray(piece.data)[: end - begin]
                kept[first + begin : first + end, places[piece.index[1]]] = values
