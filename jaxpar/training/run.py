"""A run, ready to train: its resolved config, mesh, data, kernels and first step."""

import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxpar import checkpoint
from jaxpar.config import Config, ConfigError
from jaxpar.config.layout.layer_kinds import is_recurrent
from jaxpar.config.lists.step_sizes import StepSize, config_of, step_sizes
from jaxpar.config.remat_policies import saves_on_host
from jaxpar.config.validate import resolve
from jaxpar.data.epochs import with_epochs
from jaxpar.data.loader import Loader
from jaxpar.data.pair_loader import PairLoader, open_loader
from jaxpar.data.skips import read_skipped
from jaxpar.data.teacher_cache.cache import FIELD as CACHE
from jaxpar.data.teacher_cache.loader import TeacherCacheLoader
from jaxpar.execution.decisions import execution_of, rows_per_device
from jaxpar.kernels.attention import Choice
from jaxpar.kernels.attention.dispatch.capability import xla_is_deterministic
from jaxpar.memory_checkpoint.finding import FoundCopy
from jaxpar.memory_checkpoint.restoring import restore
from jaxpar.memory_checkpoint.room import CopyPlan
from jaxpar.monitoring.gpus import open_gpus
from jaxpar.monitoring.metrics import MetricsWriter
from jaxpar.monitoring.recent_steps import last_recorded
from jaxpar.monitoring.sinks import import_packages, open_sinks, require_packages
from jaxpar.monitoring.startup import StartUp
from jaxpar.optimizer.schedules import learning_rate, on_host
from jaxpar.parallel.context import order_of
from jaxpar.planning.fit import check_fits
from jaxpar.planning.forecast import Forecast, forecast_here
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.stages import stage
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import describe, make_mesh
from jaxpar.step.state import TrainState
from jaxpar.stores.mirror import Mirror
from jaxpar.training import elastic, initial_weights
from jaxpar.training.attention_kernels import choose_kernels, test_kernels
from jaxpar.training.callbacks import CallbackCalls, Callbacks
from jaxpar.training.evaluating.held_out import open_held_out
from jaxpar.training.frozen import chosen as weights
from jaxpar.training.frozen import reference_scores
from jaxpar.training.frozen.initial import InitialWeights
from jaxpar.training.frozen.teacher import Teacher
from jaxpar.training.records import RunRecords
from jaxpar.training.selftests.experts import test_experts
from jaxpar.training.selftests.recurrent import backends_of, test_recurrences
from jaxpar.training.selftests.top_k import test_top_k
from jaxpar.training.step_guard import StepGuard


class Run:
    """A run, ready to train. Making one checks everything that can be checked; writes nothing."""

    def __init__(
        self,
        cfg: Config,
        start: Callable[[Config], int | None] = checkpoint.starting_step,
        *,
        in_folder: bool = True,
        copies: Sequence[FoundCopy] = (),
        chosen: weights.Choice | None = None,
    ):
        """
        Args:     cfg: checked; resolved here. start: returns the step of the checkpoint to resume
                  from, None to start from scratch. in_folder: False for a run that starts from
                  scratch, and neither reads nor writes its folder. copies: of the state in memory,
                  newer than the checkpoints, the newest first: it resumes from the first instead.
                  chosen: the weights of other runs. None, in a run of one process: chosen here.
        Raises:   ConfigError for anything that would stop the run later.
        """
        self.startup = StartUp()
        self.dir = run_folder(cfg) if in_folder else Path(cfg.run.dir)
        self.on_disk = start(cfg) if in_folder else None
        self.copies = list(copies)
        self.first_step = self.copies[0].group.step if copies else self.on_disk
        saved = self._saved()
        cfg = with_epochs(cfg)
        self.cfg = resolve(elastic.same_rows(cfg, saved, jax.device_count()), jax.device_count())
        self.asked = elastic.changed_by_layout(cfg, self.cfg)
        self._check_memory()
        check_host_copies(self.cfg, jax.default_backend())
        require_packages(self.cfg)
        self.execution = execution_of(self.cfg)
        self.mesh = make_mesh(self.cfg.parallel)
        order = functools.partial(order_of, self.cfg)
        self.loader = open_loader(self.cfg, self.mesh, "train", order)
        self.held_out = open_held_out(self.cfg, self.mesh, order)
        self.max_segments = max(split.max_documents for split in self._splits())
        if in_folder:
            self.loader.skipped = read_skipped(self.dir)
        self.changed = self._resume_from(saved)
        #: The weights of other runs, which every checkpoint records.
        self.weights_from = dict(weights.choose(self.cfg, saved) if chosen is None else chosen)
        self.initial = InitialWeights(self.cfg, self.weights_from, saved)
        self.origin = self.initial.origin
        self.teacher = self._teacher()
        self.kernels = choose_kernels(self.cfg, self.max_segments)
        self._of_sizes = list(self._kernels_of_sizes())
        backends_of(self.cfg)
        self.records = RunRecords(self.dir)
        self.mirror: Mirror | None = None
        #: Where this process saves its shards; None if it saves to the folder with the others.
        self.own: Path | None = None
        #: Called by all processes before a rewind: brings the newest checkpoint to the folder.
        self.bring_newest: Callable[[], None] = lambda: None
        #: What this process copies to the memory of hosts; None for a run without copies.
        self.memory: CopyPlan | None = None
        #: For the event of a start that has restored a state.
        self.restored: dict[str, Any] | None = None
        self.calls = CallbackCalls(Callbacks(), self.dir, bool(self.held_out.loaders))
        self.startup.ended("data and checks")

    def config_of(self, rows: int, length: int) -> Config:
        """Return the config of the steps of one size, sequences and the tokens of each."""
        return config_of(self.cfg, StepSize(0, rows, length))

    def _check_memory(self) -> None:
        """Check that the steps of each size fit.

        Raises:   ConfigError as `check_fits`.
        """
        for size in step_sizes(self.cfg).sizes:
            if warning := check_fits(config_of(self.cfg, size), peers.processes_here()):
                log(f"WARNING    {warning}")
                return

    def _teacher(self) -> Teacher | None:
        """Return the teacher of a distillation; None if its files are in place of it."""
        chosen = self.weights_from.get(weights.TEACHER)
        if isinstance(self.loader, TeacherCacheLoader):
            about = self.loader.taught.about
            assert chosen is not None
            if about.teacher != chosen.weights:
                rule = f"is of other weights in {weights.process()} than in process 0"
                raise ConfigError(CACHE, self.cfg.distill.cache, rule, "use one folder")
            log(f"teacher    {about.teacher_name}, by {self.cfg.distill.cache}")
            return None
        return None if chosen is None else Teacher(self.cfg, self.mesh, self.max_segments, chosen)

    def _kernels_of_sizes(self) -> Iterator[tuple[int, Config, tuple[Choice, ...]]]:
        """Yield a step to come, its config and kernels, for each size of a microbatch."""
        known, first = set(), self.first_step or 0
        for size, _ in self.loader.sizes_of_steps.until(self.cfg.train.num_steps, first):
            cfg = config_of(self.cfg, size)
            if (shape := (rows_per_device(cfg), size.length)) not in known:
                known.add(shape)
                yield max(size.step, first), cfg, choose_kernels(cfg, self.max_segments)

    def _saved(self) -> Any:
        """Read the metadata of the state to resume from; None without one."""
        if self.in_memory is not None:
            return self.in_memory
        if self.first_step is None:
            return None
        return checkpoint.read_saved(self.dir, self.first_step)

    @property
    def in_memory(self) -> checkpoint.Saved | None:
        """The metadata of the copy in memory that the run resumes from; None for a checkpoint."""
        return self.copies[0].saved if self.copies else None

    def _splits(self) -> list[Loader]:
        return [self.loader, *self.held_out.loaders.values()]

    def _resume_from(self, saved: Any) -> dict[str, tuple[Any, Any]]:
        """Check that the checkpoint fits, and skip the batches that its run skipped.

        Returns:  config fields that have changed since: their old and new values.
        """
        if saved is None:
            return {}
        checkpoint.check_resumable(self.cfg, saved)
        changed = checkpoint.changed_fields(self.cfg, saved)
        known = self.loader.skipped
        self.loader.skipped = known.and_also(saved.skipped_batches, saved.rewinds)
        check_steps(self.cfg, saved.step)
        return changed

    @property
    def attention(self) -> str:
        """A description of the attention kernels."""
        registered = f"{self.cfg.model.attention}, registered outside the package"
        return "; ".join(dict.fromkeys(map(str, self.kernels))) or registered

    @property
    def content(self) -> str:
        """Fingerprints of the datasets, which do not depend on where they are stored."""
        sums = [[s.dataset.fingerprint for s in split.sources] for split in self._splits()]
        return json.dumps(sums)

    def test_attention(self) -> None:
        """Compare the attention kernels with `reference` on the run's next batch of each size.

        Raises:   ConfigError when they disagree.
        """
        for step, cfg, kernels in self._of_sizes:
            test_kernels(kernels, cfg, self.loader, self.max_segments, step, log)

    def start(self) -> TrainState:
        """Test the kernels, then return the initial or restored state.

        Raises:   ConfigError as `test_attention`, `test_experts`, `test_recurrences` and
                  `test_top_k`.
        """
        with stage("testing the attention kernels"):
            self.test_attention()
        self.startup.ended("attention self-test")
        if self.cfg.model.num_experts:
            with stage("testing the kernels of experts"):
                test_experts(self.execution, log)
            self.startup.ended("expert self-test")
        if is_recurrent(self.cfg.model):
            with stage("testing the kernels of recurrences"):
                test_recurrences(self.cfg, log)
            self.startup.ended("recurrence self-test")
        if self.cfg.parallel.replica > 1 and self.cfg.parallel.replica_reduction == "top_k":
            with stage("testing the kernel of top_k"):
                test_top_k(self.cfg, log)
            self.startup.ended("top-k self-test")
        began, resumed = time.perf_counter(), self.first_step
        with stage("making the weights" if resumed is None else f"restoring step {resumed}"):
            state, what = self._initial_or_saved()
            jax.block_until_ready(state)
        log(f"{what} in {time.perf_counter() - began:.1f} s")
        self.startup.ended("weights" if resumed is None else "checkpoint")
        if self.teacher is not None:
            with stage("reading the teacher"):
                self.teacher.load()
            log(f"teacher    {self.teacher}")
            self.startup.ended("teacher")
        if self.cfg.dpo.beta:
            self.prepare_reference(state if resumed is None else None)
            self.startup.ended("reference")
        return state

    def taught(self, batch: Batch) -> Batch:
        """Return a batch with what the step needs of the teacher, if there is one."""
        return batch if self.teacher is None else self.teacher.attach(batch)

    def prepare_reference(self, initial: TrainState | None) -> None:
        """Give the loaders of pairs the log probabilities under the initial weights.

        Args:     initial: the initial state; None makes it, if it is needed.
        """

        def params() -> Any:
            origin = self.initial.again()
            made = initial_weights.state(self.cfg, self.mesh, origin, log).params
            self.initial.check_published(made)
            return made

        if initial is not None:
            self.initial.check_published(initial.params)
        loaders = [split for split in self._splits() if isinstance(split, PairLoader)]
        given = params if initial is None else lambda: initial.params
        of_run = self.dir, self.execution, self.mesh, self.max_segments
        with stage("computing the log probabilities of the reference"):
            reference_scores.prepare(loaders, *of_run, self.initial.identity, given, log)

    def _initial_or_saved(self) -> tuple[TrainState, str]:
        """Return the initial or restored state, and what was done, in words."""
        if self.first_step is None:
            state = initial_weights.state(self.cfg, self.mesh, self.origin, log)
            return state, f"loaded weights of {self.origin}" if self.origin else "initialized"
        began = time.perf_counter()
        state, where = self._restored()
        seconds, repeated = time.perf_counter() - began, last_recorded(self.dir)
        self.restored = {
            **{"source": where, "step": self.first_step or 0, "seconds": round(seconds, 3)},
            "repeated": max(repeated - (self.first_step or 0), 0),
        }
        for field, (then, now) in self.changed.items():
            log(f"changed    {field}: {now}, was {then}")
        of = "the checkpoint" if where == "checkpoint" else where
        return state, f"restored step {self.first_step} from {of}"

    def _restored(self) -> tuple[TrainState, str]:
        """Return the state of the first copy or checkpoint that is intact, and where it was."""
        while self.copies and self.memory is not None:
            self.first_step = self.copies[0].group.step
            try:
                return restore(self.cfg, self.mesh, self.memory.place, self.copies[0]), "memory"
            except checkpoint.Damaged as error:
                log(f"WARNING    {error}")
                del self.copies[0]
        self.first_step = self.on_disk
        if self.first_step is None:
            origin = self.initial.again()
            return initial_weights.state(self.cfg, self.mesh, origin, log), "nothing"
        state, self.first_step = checkpoint.restore_latest(self.cfg, self.mesh)
        return state, "checkpoint"

    def metrics(self) -> MetricsWriter:
        """Make the writer of the run's metrics, which also checks each step's loss and gradient."""
        cfg, first = self.cfg, self.first_step or 0
        loader, mesh = self.loader, describe(self.mesh)
        look = StepGuard(cfg, self.dir, first, loader.skipped.batch_of, log, mesh).look
        schedule, forecast = self._schedule_and_forecast
        sinks = open_sinks(cfg, self.dir, first, log)
        order = functools.partial(order_of, cfg)
        writer = MetricsWriter(
            cfg,
            self.dir,
            first,
            schedule,
            loader.epochs,
            look,
            forecast,
            sinks,
            order,
            loader.sizes_of_steps,
        )
        writer.on_record = self.calls.record
        if self.mirror is not None:
            writer.more = self.mirror.backlog
        writer.gpus = open_gpus(cfg, log) if peers.rank() == 0 else None
        return writer

    def prepare_metrics(self) -> None:
        """Import and compute what `metrics` needs. It takes a while, on the host only."""
        import_packages(self.cfg)
        self._schedule_and_forecast  # noqa: B018, cached

    @functools.cached_property
    def _schedule_and_forecast(self) -> tuple[Callable[[int], float], Forecast | None]:
        schedule = on_host(learning_rate(self.cfg.optimizer, self.cfg.train.num_steps))
        return schedule, forecast_here(self.cfg)


def run_folder(cfg: Config) -> Path:
    """Return the run folder, which need not exist yet.

    Raises:   ConfigError when the path is a file.
    """
    folder = Path(cfg.run.dir)
    if folder.exists() and not folder.is_dir():
        raise ConfigError("run.dir", cfg.run.dir, "is a file", "use --run.dir runs/NAME")
    return folder


def check_host_copies(cfg: Config, backend: str) -> None:
    """Refuse a combination that JAX 0.11 compiles for a GPU but cannot run.

    Raises:   ConfigError for it (docs/experiments/memory.md#values-in-host-memory).
    """
    unrolled, on_host = cfg.parallel.layer_loop == "unroll", saves_on_host(cfg.parallel)
    if backend == "gpu" and unrolled and on_host and xla_is_deterministic():
        rule = "fails in XLA's runtime when XLA_FLAGS requires deterministic kernels"
        rule += f" and values are offloaded to the host by parallel.remat = {cfg.parallel.remat}"
        fix = "use --parallel.layer-loop scan, remove the flag, or offload nothing (no :host)"
        raise ConfigError("parallel.layer_loop", "unroll", rule, fix)


def check_steps(cfg: Config, saved: int) -> None:
    """Raises:   ConfigError when the run is already past its last step."""
    if saved > cfg.train.num_steps:
        rule = f"must be at least the {saved} steps of the checkpoint in {cfg.run.dir}"
        raise ConfigError(
            "train.num_steps", cfg.train.num_steps, rule, f"use --train.num-steps {2 * saved}"
        )
