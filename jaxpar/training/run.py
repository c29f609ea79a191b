"""A run, ready to train: its resolved config, mesh, data, kernels and first step."""

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.saved import Saved, changed_fields, read_saved, starting_step
from jaxpar.components.experts import experts_in
from jaxpar.config import Config, ConfigError, layers
from jaxpar.config.listed import written
from jaxpar.config.lists.step_sizes import StepSize, config_of, step_sizes
from jaxpar.config.remat_policies import saves_on_host
from jaxpar.config.validate import resolve
from jaxpar.data.loader import Loader, open_loader, with_epochs
from jaxpar.data.skips import read_skipped
from jaxpar.execution.decisions import Execution, execution_of, rows_per_device
from jaxpar.kernels.attention import Choice
from jaxpar.kernels.attention.capability import xla_is_deterministic
from jaxpar.monitoring.goodput import StartUp
from jaxpar.monitoring.recent_steps import last_recorded
from jaxpar.monitoring.sinks import require_packages
from jaxpar.objectives.objective import objective_of
from jaxpar.parallel.context import order_of
from jaxpar.prediction.startup import check_fits
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.stages import stage
from jaxpar.sharding.batch import Batch, with_abstract_extra
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import TrainState
from jaxpar.training import chosen as weights
from jaxpar.training import elastic, initial_weights
from jaxpar.training.certified import Certified, certified
from jaxpar.training.evaluation import HeldOut, open_held_out
from jaxpar.training.initial_weights import InitialWeights
from jaxpar.training.selftests.attention import choose_kernels, test_kernels

if TYPE_CHECKING:
    from jaxpar.memory_checkpoint.plan import CopyPlan
    from jaxpar.memory_checkpoint.restoring import FoundCopy
    from jaxpar.training.supplement import Supplement

# What only some runs need, such as copies in memory or the tests of kernels of experts, is imported
# where it is used.


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """A run, ready to train. Nothing changes it: what changes during a run is in its state and in
    its callbacks."""

    cfg: Config
    """Resolved for the devices."""
    dir: Path
    on_disk: int | None
    """The step of the checkpoint to resume from; None to start from scratch."""
    copies: "tuple[FoundCopy, ...]"
    """Copies of the state in memory that are newer, the newest first."""
    memory: "CopyPlan | None" = None
    """What this process copies to the memory of hosts; None for a run without copies."""
    asked: Mapping[str, Any]
    """Values of the command that differ from the config."""
    execution: Execution
    mesh: Mesh
    loader: Loader
    held_out: HeldOut
    max_segments: int
    changed: Mapping[str, tuple[Any, Any]]
    """Fields of the config that have changed since the checkpoint: their old and new values."""
    weights_from: Mapping[str, weights.Chosen]
    """The weights of other runs, which every checkpoint records."""
    initial: InitialWeights
    supplement: "Supplement | None"
    """What the objective needs in addition."""
    kernels: tuple[Choice, ...]
    of_sizes: tuple[tuple[int, Config, tuple[Choice, ...]], ...]
    """A step to come, its config and kernels, for each size of a microbatch."""
    startup: StartUp
    certified: Certified | None

    @classmethod
    def open(
        cls,
        cfg: Config,
        start: Callable[[Config], int | None] = starting_step,
        *,
        in_folder: bool = True,
        copies: "Sequence[FoundCopy]" = (),
        chosen: weights.Choice | None = None,
        certificate: str = "",
        devices: Sequence[jax.Device] | None = None,
    ) -> "Run":
        """Check everything that can be checked. Writes nothing.

        Args:     cfg: checked; resolved here. start: returns the step of the checkpoint to resume
                  from, None to start from scratch. in_folder: False for a run that starts from
                  scratch, and neither reads nor writes its folder. copies: of the state in memory,
                  newer than the checkpoints, the newest first: it resumes from the first instead.
                  chosen: the weights of other runs. None, in a run of one process: chosen here.
                  certificate: a file; "" for that of the folder, if it has one. devices: None for
                  all.
        Raises:   ConfigError for anything that would stop the run later.
        """
        startup = StartUp()
        folder = run_folder(cfg) if in_folder else Path(cfg.run.dir)
        on_disk = start(cfg) if in_folder else None
        first = copies[0].group.step if copies else on_disk
        saved = None
        if first is not None:
            saved = copies[0].saved if copies else read_saved(folder, first)
        given = with_epochs(cfg)
        count = jax.device_count() if devices is None else len(devices)
        cfg = resolve(elastic.same_rows(given, saved, count), count)
        check_memory(cfg)
        check_host_copies(cfg, jax.default_backend())
        require_packages(cfg)
        execution = execution_of(cfg)
        mesh = make_mesh(cfg.parallel) if devices is None else make_mesh(cfg.parallel, devices)
        order = functools.partial(order_of, cfg)
        loader = open_loader(cfg, mesh, "train", order)
        held_out = open_held_out(cfg, mesh, order)
        most = max(split.max_documents for split in [loader, *held_out.loaders.values()])
        if in_folder:
            loader.skipped = read_skipped(folder)
        changed: dict[str, tuple[Any, Any]] = {}
        if saved is not None:
            shape_of = copies[0].shapes.__getitem__ if copies else None
            from jaxpar.checkpoint.loading import check_resumable

            check_resumable(cfg, saved, shape_of)
            changed = {
                path: values
                for path, values in changed_fields(cfg, saved).items()
                if path != layers.FIELD  # whose places are printed
            }
            loader.skipped = loader.skipped.and_also(saved.skipped_batches, saved.rewinds)
            loader.go_on(saved.position, str(saved))
            check_steps(cfg, saved.step)
        weights_from = dict(weights.choose(cfg, saved) if chosen is None else chosen)
        initial = InitialWeights(cfg, weights_from, saved)
        supplement = objective_of(cfg).prepare(cfg, mesh, loader, most, weights_from)
        kernels = choose_kernels(cfg, most)
        of_sizes = tuple(kernels_of_sizes(cfg, loader, first or 0, most))
        if cfg.model.recurrent:
            from jaxpar.training.selftests.recurrent import backends_of

            backends_of(cfg)
        found = None
        if in_folder:
            found = certified(given, folder, certificate, count)
        startup.ended("data and checks")
        return cls(
            cfg=cfg,
            dir=folder,
            on_disk=on_disk,
            copies=tuple(copies),
            asked=elastic.changed_by_layout(given, cfg),
            execution=execution,
            mesh=mesh,
            loader=loader,
            held_out=held_out,
            max_segments=most,
            changed=changed,
            weights_from=weights_from,
            initial=initial,
            supplement=supplement,
            kernels=kernels,
            of_sizes=of_sizes,
            startup=startup,
            certified=found,
        )

    @property
    def first_step(self) -> int | None:
        """The step to resume from, if its state is intact; None to start from scratch."""
        return self.copies[0].group.step if self.copies else self.on_disk

    @property
    def origin(self) -> initial_weights.Origin | None:
        """The weights of `run.init_from`."""
        return self.initial.origin

    def config_of(self, rows: int, length: int) -> Config:
        """Return the config of the steps of one size, sequences and the tokens of each."""
        return config_of(self.cfg, StepSize(0, rows, length))

    @property
    def in_memory(self) -> Saved | None:
        """The metadata of the copy in memory that the run resumes from; None for a checkpoint."""
        return self.copies[0].saved if self.copies else None

    @property
    def splits(self) -> list[Loader]:
        """The loaders of all data."""
        return [self.loader, *self.held_out.loaders.values()]

    @property
    def attention(self) -> str:
        """A description of the attention kernels."""
        mixers = [layer.mixer for layer in self.cfg.model.layers]
        functions = [getattr(mixer, "function", type(mixer).__name__) for mixer in mixers if mixer]
        registered = (f"{name}, defined outside the package" for name in functions)
        return "; ".join(dict.fromkeys(list(map(str, self.kernels)) or registered))

    @property
    def content(self) -> str:
        """Fingerprints of the datasets, which do not depend on where they are stored."""
        sums = [[s.dataset.fingerprint for s in split.sources] for split in self.splits]
        return json.dumps(sums)

    def test_attention(self) -> None:
        """Compare the attention kernels with `reference` on the run's next batch of each size.

        Raises:   ConfigError when they disagree.
        """
        for step, cfg, kernels in self.of_sizes:
            test_kernels(kernels, cfg, self.loader, self.max_segments, step, log)

    def start(self) -> "Start":
        """Test the kernels unless they are certified, then return the initial or restored state.

        Raises:   ConfigError when a kernel gives wrong numbers; as a restore.
        """
        if self.certified is None or not self.certified.has_kernels:
            self._test_kernels()
        began, resumed = time.perf_counter(), self.first_step
        with stage("making the weights" if resumed is None else f"restoring step {resumed}"):
            start, what = self._initial_or_saved()
            self.go_on_from(start.saved)  # an earlier one, if the arrays of another are damaged
            jax.block_until_ready(start.state)
        log(f"{what} in {time.perf_counter() - began:.1f} s")
        self.startup.ended("weights" if resumed is None else "checkpoint")
        if self.supplement is not None:
            self.supplement.load(self, start.state if resumed is None else None)
            self.startup.ended(self.supplement.name)
        return start

    def _test_kernels(self) -> None:
        """Raises:   ConfigError when a kernel gives wrong numbers."""
        with stage("testing the attention kernels"):
            self.test_attention()
        self.startup.ended("attention self-test")
        if experts_in(self.cfg.model):
            from jaxpar.training.selftests.experts import test_experts

            with stage("testing the kernels of experts"):
                test_experts(self.execution, log)
            self.startup.ended("expert self-test")
        if self.cfg.model.recurrent:
            from jaxpar.training.selftests.recurrent import test_recurrences

            with stage("testing the kernels of recurrences"):
                test_recurrences(self.cfg, log)
            self.startup.ended("recurrence self-test")
        if self.cfg.parallel.replica > 1 and self.cfg.parallel.replica_reduction == "top_k":
            from jaxpar.training.selftests.top_k import test_top_k

            with stage("testing the kernel of top_k"):
                test_top_k(self.cfg, log)
            self.startup.ended("top-k self-test")

    def go_on_from(self, saved: Saved | None) -> None:
        """Have the data go on from where a state was saved; None: from the start."""
        self.loader.go_on(None if saved is None else saved.position, str(saved))

    def supplemented(self, batch: Batch) -> Batch:
        """Return a batch, which may be abstract, with all that the step reads of it."""
        if isinstance(batch.tokens, jax.ShapeDtypeStruct):
            return with_abstract_extra(batch, self.cfg)
        return batch if self.supplement is None else self.supplement.attach(batch)

    def _initial_or_saved(self) -> tuple["Start", str]:
        """Return the initial or restored state, and what was done, in words."""
        if self.first_step is None:
            state = initial_weights.state(self.cfg, self.mesh, self.origin, log)
            what = f"loaded weights of {self.origin}" if self.origin else "initialized"
            return Start(state), what
        began = time.perf_counter()
        start, where = self._restored()
        seconds, step = time.perf_counter() - began, start.step or 0
        event = {"source": where, "step": step, "seconds": round(seconds, 3)}
        event["repeated"] = max(last_recorded(self.dir) - step, 0)
        for field, (then, now) in self.changed.items():
            log(f"changed    {field}: {now}, was {then}")
        of = "the checkpoint" if where == "checkpoint" else where
        return start._replace(restored=event), f"restored step {start.step} from {of}"

    def _restored(self) -> tuple["Start", str]:
        """Return the state of the first copy or checkpoint that is intact, and where it was."""
        for copy in self.copies:
            try:
                from jaxpar.memory_checkpoint.restoring import restore

                assert self.memory is not None  # it has been asked for copies
                state = restore(self.cfg, self.mesh, self.memory.place, copy)
                return Start(state, copy.group.step, copy.saved, copy), "memory"
            except Damaged as error:
                log(f"WARNING    {error}")
        if self.on_disk is None:
            origin = self.initial.again()
            return Start(initial_weights.state(self.cfg, self.mesh, origin, log)), "nothing"
        from jaxpar.checkpoint.loading import restore_latest

        state, step = restore_latest(self.cfg, self.mesh)
        return Start(state, step, read_saved(self.dir, step)), "checkpoint"


class Start(NamedTuple):
    """A state that a run starts from, or goes back to."""

    state: TrainState
    step: int | None = None
    """Its step; None for the initial state."""
    saved: Saved | None = None
    """The metadata of the copy or the checkpoint that it was read from."""
    copy: "FoundCopy | None" = None
    """The copy in memory that it was read from."""
    restored: Mapping[str, Any] | None = None
    """For the event of a start that has restored a state."""


def check_memory(cfg: Config) -> None:
    """Check that the steps of each size fit.

    Raises:   ConfigError as `check_fits`.
    """
    for size in step_sizes(cfg).sizes:
        if warning := check_fits(config_of(cfg, size), peers.processes_here()):
            log(f"WARNING    {warning}")
            return


def kernels_of_sizes(
    cfg: Config, loader: Loader, first: int, max_segments: int
) -> Iterator[tuple[int, Config, tuple[Choice, ...]]]:
    """Yield a step after the first, its config and kernels, for each size of a microbatch."""
    known = set()
    for size, _ in loader.sizes_of_steps.until(cfg.train.num_steps, first):
        of_size = config_of(cfg, size)
        if (shape := (rows_per_device(of_size), size.length)) not in known:
            known.add(shape)
            yield max(size.step, first), of_size, choose_kernels(of_size, max_segments)


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

    Raises:   ConfigError for it (docs/experiments.md#values-in-host-memory).
    """
    unrolled, on_host = cfg.parallel.layer_loop == "unroll", saves_on_host(cfg.parallel)
    if backend == "gpu" and unrolled and on_host and xla_is_deterministic():
        rule = "fails in XLA's runtime when XLA_FLAGS requires deterministic kernels"
        rule += " and values are offloaded to the host by parallel.remat = "
        rule += written(cfg.parallel.remat)
        fix = "use --parallel.layer-loop scan, remove the flag, or offload nothing (no :host)"
        raise ConfigError("parallel.layer_loop", "unroll", rule, fix)


def check_steps(cfg: Config, saved: int) -> None:
    """Raises:   ConfigError when the run is already past its last step."""
    if saved > cfg.train.num_steps:
        rule = f"must be at least the {saved} steps of the checkpoint in {cfg.run.dir}"
        raise ConfigError(
            "train.num_steps", cfg.train.num_steps, rule, f"use --train.num-steps {2 * saved}"
        )
