"""Write a dataset in parts: a plan first, then the parts, by any processes, then the manifest.

The plan cuts the files of the input, in order, into parts by bytes, and decides what depends on all
of the text: the tokenizer, and the borders of the splits. So tokens and document starts are the
same for any number of parts and processes. Until the dataset is complete, it is beside the output:

    OUTPUT.partial/      becomes the output
        plan.json        what is prepared
        tokenizer.json
        part-00017/      a complete part: its files, counts.npy and part.json
        .part-00018.*    one that is being written, or that a killed process has left

Whoever completes the last part writes the manifest.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from msgspec import Struct, structs

from jaxpar.config import ConfigError, declared, flag
from jaxpar.config.declared import Count, Name
from jaxpar.config.options import check_ranges
from jaxpar.config.rules.paths import check_path, is_address
from jaxpar.data.formats.compressed import RowCounts
from jaxpar.data.formats.meta import (
    COUNTS_FILE,
    META_FILE,
    PART_FILE,
    PLAN_FILE,
    TRAIN,
    Meta,
    Part,
    part_folder,
    read_meta,
)
from jaxpar.data.formats.writer import SplitWriter, check_target, replace_folder, write_meta
from jaxpar.data.options import PrepareChatOptions, PrepareOptions, PreparePairsOptions
from jaxpar.data.prepare.documents import InputFile, cut_files
from jaxpar.data.prepare.progress import PreparationProgress
from jaxpar.data.prepare.splits import Borders, check_no_split_is_empty, in_words, shares_of
from jaxpar.data.prepare.stored_parts import StoredParts
from jaxpar.data.processes import Processes
from jaxpar.data.stored import whole_address
from jaxpar.data.tokenizer import BPE, EOS_TOKEN, JsonTokenizer, Tokenizer
from jaxpar.runtime.files import atomic, lock
from jaxpar.runtime.units import size

#: Bytes of input of a part, unless --parts says how many there are.
PART_BYTES = 8 << 30

#: Bytes of input for each process that encodes: starting one takes a second.
WORKER_BYTES = 4 << 20

#: Seconds between two reports of a part.
REPORT_SECONDS = 0.2

#: Most bytes of a plan, whose tokenizer.json has megabytes.
MAX_PLAN_BYTES = 256 << 20

LOCK_FILE = ".lock"

type PreparedOptions = PrepareOptions | PrepareChatOptions | PreparePairsOptions

#: Options that do not change what is prepared.
_HOW = ("output", "overwrite", "workers", "part", "engine", "input")


class PartsPlan(Struct, frozen=True, kw_only=True):
    """The content of plan.json."""

    VERSION: ClassVar[int] = 2

    about: dict[Name, Any]
    """What decides about the dataset: the options, and a hash of the names and sizes of the files
    of the input."""
    borders: Borders
    trained: str
    """tokenizer.json of --tokenizer bpe:N."""


class PartJson(Struct, frozen=True, kw_only=True):
    """The content of part.json."""

    VERSION: ClassVar[int] = 1

    splits: dict[Name, Part]
    num_good: Count
    num_bad: Count
    num_blank: Count
    first_bad: str
    left_out: tuple[str, ...]
    """A line about the members of each tar file that were not read."""


#: Called with the bytes of input that are read, and the tokens that are written.
type Report = Callable[[tuple[int, int]], None]


class WrittenPart(NamedTuple):
    """A part that was written."""

    splits: dict[str, Part]
    counts: np.ndarray
    """int64 [vocab_size]: of each token in the training split."""
    rows: RowCounts

    @classmethod
    def of(cls, writers: dict[str, SplitWriter], rows: RowCounts) -> "WrittenPart":
        """Close the writers."""
        splits = {split: writer.close() for split, writer in writers.items()}
        return cls(splits, writers[TRAIN].token_counts, rows)


class Corpus(Protocol):
    """What a command prepares. It is sent to the processes that write parts."""

    @property
    def options(self) -> Any:
        """The options of the command."""
        ...

    @property
    def in_one_part(self) -> bool:
        """Whether there can be one part only."""
        ...

    def files(self, log: Callable[[str], None]) -> list[InputFile]:
        """Return the files of the input. Raises:   ConfigError."""
        ...

    def tokenizer(self, files: Sequence[InputFile], log: Callable[[str], None]) -> Tokenizer:
        """Open or train the tokenizer. Raises:   ConfigError."""
        ...

    def borders(self, files: Sequence[InputFile]) -> Borders:
        """Return the borders of the splits. Raises:   ConfigError."""
        ...

    def write(self, task: "Task", folder: Path, report: Report) -> WrittenPart:
        """Write a part. Raises:   ConfigError for what cannot be read."""
        ...

    @property
    def more(self) -> dict[str, Any]:
        """Other fields of `Meta`."""
        ...

    @property
    def fix(self) -> str:
        """How to get documents into every split."""
        ...


@dataclasses.dataclass(frozen=True)
class Task:
    """A part to write, by any process that shares the folder."""

    corpus: Corpus
    work: Path
    number: int
    files: Sequence[InputFile]
    borders: Borders
    tokenizer: Tokenizer
    workers: int = 1
    """Processes that encode."""
    stored: str = ""
    """The address that has the parts, in place of the folder."""

    @property
    def num_bytes(self) -> int:
        """Bytes of input."""
        return sum(file.num_bytes for file in self.files)

    @property
    def folder(self) -> Path:
        """The folder of the part."""
        return self.work / part_folder(self.number)

    def writers(
        self, folder: Path, make: type[SplitWriter] = SplitWriter
    ) -> dict[str, SplitWriter]:
        """Return the writer of each split, in a folder."""
        splits = shares_of(self.corpus.options.holdout, self.corpus.options.split).splits
        size, eos_id = self.tokenizer.vocab_size, self.tokenizer.eos_id
        return {split: make(folder, split, size, eos_id) for split in splits}

    @property
    def is_complete(self) -> bool:
        """Whether the part is there."""
        return (self.folder / PART_FILE).is_file()


def write_part(task: Task, report: Report) -> None:
    """Write a part, completely or not at all.

    Raises:   ConfigError for what cannot be read.
    """
    unsent = [task.folder] if task.stored else []
    for left in [*sorted(task.work.glob(f".{task.folder.name}.*")), *unsent]:
        shutil.rmtree(left, ignore_errors=True)
    try:
        with atomic.new_folder(task.folder) as folder:
            splits, counts, rows = task.corpus.write(task, folder, _seldom(report))
            found = PartJson(
                splits=splits,
                num_good=rows.num_good,
                num_bad=rows.num_bad,
                num_blank=rows.num_blank,
                first_bad=rows.first_bad,
                left_out=tuple(rows.left_out()),
            )
            np.save(folder / COUNTS_FILE, counts)
            (folder / PART_FILE).write_text(declared.to_json(found), "utf-8")
    except OSError:
        if not task.is_complete:  # by another process, meanwhile
            raise
    if task.stored:
        StoredParts(task.stored).send(task.folder)


def _seldom(report: Report) -> Report:
    """Return a function that reports a few times a second: a message costs more than a document."""
    after = 0.0

    def perhaps(done: tuple[int, int]) -> None:
        nonlocal after
        if (now := time.monotonic()) >= after:
            report(done)
            after = now + REPORT_SECONDS

    return perhaps


class PartsProgress:
    """Sums the progress of parts."""

    def __init__(self, tasks: Sequence[Task], shown: PreparationProgress):
        self._total, self._shown = sum(task.num_bytes for task in tasks), shown
        self._done, self._lock = dict[int, tuple[int, int]](), threading.Lock()

    def of(self, task: Task) -> Report:
        """Return what a part reports to."""

        def report(done: tuple[int, int]) -> None:
            with self._lock:
                self._done[task.number] = done
                position, tokens = (sum(of) for of in zip(*self._done.values(), strict=True))
                self._shown.advance(position, self._total, tokens)

        return report


def write_parts(tasks: Sequence[Task], workers: int, progress: PartsProgress) -> None:
    """Write parts in processes of this host.

    Args:     workers: processes that encode.
    """
    needed = max(sum(task.num_bytes for task in tasks) // WORKER_BYTES, 1)
    at_once = max(min(workers, needed, sum(bool(task.files) for task in tasks)), 1)
    each = [min(workers // at_once, task.num_bytes // WORKER_BYTES) for task in tasks]
    tasks = [dataclasses.replace(t, workers=max(n, 1)) for t, n in zip(tasks, each, strict=True)]
    if at_once == 1:
        for task in tasks:
            write_part(task, progress.of(task))
        return
    with Processes(write_part, "writes parts", at_once, says=True) as processes:
        calls = [processes.call(task, heard=progress.of(task)) for task in tasks]
        for call in as_completed(calls):
            call.result()


def prepare_parts(corpus: Corpus, progress: PreparationProgress) -> Meta | None:
    """Prepare a dataset, or a part of it.

    Returns:  the contents of its meta.json; None if other parts are missing.
    Raises:   ConfigError that names an option, or an unreadable file and line.
    """
    options, log = corpus.options, progress.log
    check_ranges(options)
    shares = shares_of(options.holdout, options.split)
    files = corpus.files(log)
    total = sum(file.num_bytes for file in files)
    count = options.parts or (1 if corpus.in_one_part else max(-(-total // PART_BYTES), 1))
    if options.part is not None and options.part >= count:
        rule = f"must be below the number of parts, {count:,}"
        raise ConfigError("--part", options.part, rule, f"use --parts {options.part + 1}")
    trained = options.tokenizer.startswith(BPE)
    tokenizer = None if trained else corpus.tokenizer(files, log)
    about = _about(options, count, files, tokenizer)
    target, stored = Path(options.output).expanduser().resolve(), _stored(options, count)
    if options.part is not None and (known := _known(target, stored, about)):
        log(f"{options.output} is complete")
        return known
    with _work_folder(options, about, stored) as work:
        plan = plan_of(work, about)
        if plan is None:
            tokenizer = tokenizer or corpus.tokenizer(files, log)
            text = tokenizer.json_text if isinstance(tokenizer, JsonTokenizer) and trained else ""
            made = PartsPlan(about=about, borders=corpus.borders(files), trained=text)
            atomic.create(work / PLAN_FILE, declared.to_json(made).encode())
            if stored:
                stored.share_plan(work)
            plan = plan_of(work) or made  # of several processes, the first one decides
            _check_plan(plan, options, about, work)
        if trained:
            tokenizer = JsonTokenizer(plan.trained, EOS_TOKEN)
        assert tokenizer is not None
        if line := in_words(plan.borders, shares):
            log(line)
        address = options.output if stored else ""
        tasks = [
            Task(corpus, work, number, some, plan.borders, tokenizer, stored=address)
            for number, some in enumerate(cut_files(files, count))
        ]
        if empty := sum(not task.files for task in tasks):
            log(f"{empty:,} of {count:,} parts are empty: the input is cut into {count - empty:,}")
        missing = _missing(tasks, stored)
        asked = [task for task in missing if options.part in (None, task.number)]
        of_all = f", {len(asked):,} of {count:,} parts" if count > 1 else ""
        num_bytes = sum(task.num_bytes for task in asked)
        log(f"encoding {size(num_bytes)} of input{of_all}")
        engine = ray_engine if options.engine == "ray" else write_parts
        engine(asked, options.workers, PartsProgress(asked, progress))
        if not _missing(tasks, stored):
            if stored:
                stored.fetch(work, [task.folder.name for task in tasks])
            return _finish(corpus, work, tokenizer, tasks, log)
        if options.part is not None:
            return None
        rule = "lacks parts that were written: not all hosts share its folder"
        raise ConfigError("--output", options.output, rule, "use a folder that they share")
    return read_meta(target)  # another process has completed it meanwhile


def _stored(options: PreparedOptions, count: int) -> StoredParts | None:
    """Return the parts at an address; None for those in a folder, or one that is sent at the end.

    Raises:   ConfigError.
    """
    alone = count == 1 and options.part is None and options.engine != "ray"
    if alone or not is_address(options.output):
        return None
    if options.overwrite and options.part is not None:
        rule = "cannot go with --part and an address, where each task would delete what others sent"
        raise ConfigError("--overwrite", True, rule, "delete the dataset first")
    return StoredParts(options.output)


def _known(target: Path, stored: StoredParts | None, about: dict[str, Any]) -> Meta | None:
    """Return the meta.json of a dataset that is complete; None if it is not, or another one."""
    if stored is None:
        return read_meta(target) if plan_of(target, about) else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = stored.copy(PLAN_FILE, folder) and plan_of(folder, about)
        return read_meta(folder) if ours and stored.copy(META_FILE, folder) else None


def _missing(tasks: Sequence[Task], stored: StoredParts | None) -> list[Task]:
    """Return the tasks whose parts are not there."""
    if stored is None:
        return [task for task in tasks if not task.is_complete]
    there = stored.complete()
    return [task for task in tasks if task.folder.name not in there]


def ray_engine(tasks: Sequence[Task], workers: int, progress: PartsProgress) -> None:
    """Write parts on a Ray cluster."""
    from jaxpar.data.prepare.ray_engine import write_parts

    write_parts(tasks, workers, progress)


def _about(
    options: PreparedOptions, count: int, files: Sequence[InputFile], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return what decides about the dataset."""
    found = {k: v for k, v in dataclasses.asdict(options).items() if k not in _HOW}
    named = json.dumps([(str(file.path), file.num_bytes) for file in files])
    found |= {"input": hashlib.sha256(named.encode()).hexdigest(), "parts": count}
    if tokenizer is not None:
        found["tokenizer"] = [tokenizer.fingerprint, tokenizer.eos_token]
    known: dict[str, Any] = json.loads(json.dumps(found))  # as it is when it is read again
    return known


def plan_of(folder: Path, about: dict[str, Any] | None = None) -> PartsPlan | None:
    """Return the plan of a folder; None if there is none, or none of `about`.

    Raises:   ConfigError if it is damaged.
    """
    path = folder / PLAN_FILE
    if not path.is_file():
        return None
    try:
        plan = declared.read(PartsPlan, path, max_bytes=MAX_PLAN_BYTES)
    except (OSError, ValueError) as error:
        rule, fix = f"has no readable plan ({error})", f"delete {folder}, and try again"
        raise ConfigError("--output", str(folder), rule, fix) from error
    return plan if about is None or plan.about == about else None


@contextmanager
def _work_folder(
    options: PreparedOptions, about: dict[str, Any], stored: StoredParts | None
) -> Iterator[Path]:
    """Yield the folder of the parts, which becomes the output once it has a meta.json.

    If the block fails, complete parts are kept, for the same command; one part alone is not.

    Raises:   ConfigError("--output", ...) if the output exists, is no path, or cannot be created,
              or the folder has other parts; as `whole_address`.
    """
    output = options.output
    if is_address(output):
        with whole_address(output, options.overwrite, options.part) as staging:
            if stored:
                _begin_stored(stored, staging, options, about)
            yield staging
        return
    check_path("--output", output, "use a folder of this computer")
    target = Path(output).expanduser().resolve()
    check_target(target, options.overwrite)
    work = target.with_name(f"{target.name}.partial")
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be created: {error.strerror}"
        raise ConfigError("--output", output, rule, "use a writable folder") from error
    with contextlib.nullcontext() if options.part is not None else _only_writer(work, output):
        _check_parts(work, options, about)
        try:
            yield work
            if (work / META_FILE).is_file():
                check_target(target, options.overwrite)  # another process may have written it
                replace_folder(target, work)
        except BaseException as error:
            if isinstance(error, FileNotFoundError) and plan_of(target, about):
                return
            some = about["parts"] > 1 and bool(sorted(work.glob("part-*")))
            kept = options.part is not None or some
            if not kept:
                shutil.rmtree(work, ignore_errors=True)
            raise


@contextmanager
def _only_writer(work: Path, output: str) -> Iterator[None]:
    """Lock a folder. Raises:   ConfigError if another process has locked it."""
    try:
        with lock.locked(work / LOCK_FILE, wait=False):
            yield
    except BlockingIOError:
        rule = "is being written by another process"
        raise ConfigError("--output", output, rule, "wait for it, or use another folder") from None


def _begin_stored(
    stored: StoredParts, work: Path, options: PreparedOptions, about: dict[str, Any]
) -> None:
    """Copy the plan of an address, or delete another one. Raises:   ConfigError for another one."""
    plan = plan_of(work) if stored.copy(PLAN_FILE, work) else None
    if not options.overwrite:
        if plan:
            _check_plan(plan, options, about, options.output)
    elif stored.copy(META_FILE, work) or plan is None or plan.about != about:
        stored.delete()
        for name in (META_FILE, PLAN_FILE):
            (work / name).unlink(missing_ok=True)


def _check_plan(
    plan: PartsPlan, options: PreparedOptions, about: dict[str, Any], place: Path | str
) -> None:
    """Raise ConfigError for a plan of other options."""
    if plan.about != about:
        names = [key for key in about if plan.about.get(key) != about[key]]
        rule = f"has parts in {place} that differ in {', '.join(map(flag, names))}"
        fix = f"use the same options, or another folder, or delete {place}"
        raise ConfigError("--output", options.output, rule, fix)


def _check_parts(work: Path, options: PreparedOptions, about: dict[str, Any]) -> None:
    """Delete what is left of another plan. Raises:   ConfigError for its complete parts."""
    plan = plan_of(work)
    if plan is None or plan.about == about:
        return
    if options.part is not None or (sorted(work.glob("part-*")) and not options.overwrite):
        _check_plan(plan, options, about, work)
    for path in sorted(work.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK_FILE:
            path.unlink()


def _finish(
    corpus: Corpus,
    work: Path,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    log: Callable[[str], None],
) -> Meta:
    """Write the manifest of parts that are all complete.

    Raises:   ConfigError if a split that is asked for has no documents, or all rows are bad.
    """
    options, rows = corpus.options, RowCounts()
    shares, given = shares_of(options.holdout, options.split), " ".join(options.input)
    found = [read_part(task.folder, shares.splits) for task in tasks]
    for part in found:
        rows.num_good += part.num_good
        rows.num_bad += part.num_bad
        rows.num_blank += part.num_blank
        rows.first_bad = rows.first_bad or part.first_bad
    rows.check(given)
    documents = {
        split: sum(part.splits[split].num_documents for part in found) for split in shares.splits
    }
    if not any(documents.values()):
        raise ConfigError("--input", given, "has no text", "use files with documents")
    check_no_split_is_empty(documents, shares, options.holdout, options.split, corpus.fix)
    for line in itertools.chain(rows.lines(), *(part.left_out for part in found)):
        log(line)
    counts = sum(np.load(task.folder / COUNTS_FILE, allow_pickle=False) for task in tasks)
    prefix = [f"{task.folder.name}/" for task in tasks]
    if len(tasks) == 1 and not tasks[0].stored:
        prefix = [""]
        _lift(work, tasks[0].folder)
    splits = {
        split: [
            structs.replace(part.splits[split], name=before + split)
            for before, part in zip(prefix, found, strict=True)
        ]
        for split in shares.splits
    }
    for left in sorted(work.glob(".*")):
        left.unlink() if left.is_file() else shutil.rmtree(left, ignore_errors=True)
    return write_meta(
        work,
        tokenizer,
        counts,
        splits,
        inputs=options.input,
        holdout=shares.val,
        test=shares.test,
        bad_rows=rows.num_bad,
        first_bad_row=rows.first_bad,
        **corpus.more,
    )


def read_part(folder: Path, splits: Sequence[str]) -> PartJson:
    """Read what a complete part is. Raises:   ConfigError if it is damaged; FileNotFoundError."""
    try:
        found = declared.read(PartJson, folder / PART_FILE)
        if set(found.splits) != set(splits):
            raise ValueError(f"its splits are {', '.join(found.splits)}")
    except ValueError as error:
        rule, fix = f"has a damaged {PART_FILE} ({error})", "delete it, and run the command again"
        raise ConfigError("--output", str(folder), rule, fix) from error
    return found


def _lift(work: Path, folder: Path) -> None:
    """Make the files of the only part those of the dataset."""
    for path in sorted(folder.iterdir()):
        if path.name not in (COUNTS_FILE, PART_FILE):
            atomic.move(path, work / path.name)
    shutil.rmtree(folder)
    (work / PLAN_FILE).unlink()
