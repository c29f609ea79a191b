"""Replays a step of a run, to find the cause of a bad result."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxpar.certification.options import ReplayOptions
from jaxpar.checkpoint.inspection import require_whole
from jaxpar.checkpoint.loading import check_resumable, restore
from jaxpar.checkpoint.saved import first_whole, read_saved, saved_config, saved_steps
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.code import with_code
from jaxpar.config.json_reader import UnreadableJson, read_json
from jaxpar.config.options import check_ranges
from jaxpar.config.rules.limits import MAX_INT
from jaxpar.config.serialize import from_values
from jaxpar.config.validate import check
from jaxpar.data.skips import SkippedBatches
from jaxpar.monitoring.recent_steps import RECENT_FILE, bits, read_recent, values_judged
from jaxpar.runtime import start as runtime
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.stages import Stage, stage
from jaxpar.sharding.axes import AXES, BATCH_SPEC
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.fingerprint import fingerprints
from jaxpar.sharding.mesh import describe, make_mesh
from jaxpar.step.diloco.outer import OuterSteps
from jaxpar.step.diloco.overlap import under_way
from jaxpar.step.state import TrainState, state_shardings
from jaxpar.step.train_step import Metrics, make_train_step
from jaxpar.training import initial_weights
from jaxpar.training.chosen import recorded_in
from jaxpar.training.run import Run
from jaxpar.training.step_guard import Window

#: Relative difference of a step's loss between devices or meshes, up to which the order of sums
#: explains it.
ROUNDING = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


@dataclass(frozen=True)
class ReplayedStep:
    """The result of a step."""

    loss: float
    grad_norm: float
    state: dict[str, str]
    """Fingerprints of the state after the step."""

    @property
    def bits(self) -> dict[str, str]:
        """The bits of loss and gradient norm, as in the records."""
        return {"loss": bits(self.loss), "grad_norm": bits(self.grad_norm)}

    def __str__(self) -> str:
        return f"loss {self.loss:.6g}, grad norm {self.grad_norm:.6g}, bits {self.bits['loss']}"


class StepsAgain:
    """Takes the steps of a run again, in memory."""

    def __init__(
        self,
        run: Run,
        begin: int,
        records: Mapping[int, dict[str, Any]],
        flags: Mapping[str, Any] = MappingProxyType({}),
    ):
        """
        Args:     begin: the checkpoint to begin with; 0: the start of the run. records: by step.
                  flags: of XLA, with which steps are compiled, beside those of the process.
        """
        self.run, self.begin, self.records, self.flags = run, begin, records, dict(flags)
        self._skipped, run.loader.skipped = run.loader.skipped, SkippedBatches()
        self._outer_steps = OuterSteps(run.cfg, run.mesh)
        self._programs: dict[tuple[Mesh, Config, int | None], Callable] = {}

    def start(self) -> TrainState:
        """Return the state that the steps begin with."""
        run = self.run
        if run.supplement is not None:
            run.supplement.load(run, None)
        if self.begin:
            return restore(run.cfg, run.mesh, self.begin)
        return initial_weights.state(run.cfg, run.mesh, run.origin, log)

    def batch_of(self, done: int) -> int:
        """Return the number of the batch of the step after `done`."""
        return self.records.get(done + 1, {}).get("batch", self._skipped.batch_of(done))

    def batch_on(self, mesh: Mesh, number: int) -> Batch:
        """Return a batch of the run on the devices of a mesh of the same shape."""
        batch = self.run.supplemented(self.run.loader.batch(number))
        return jax.device_put(batch, NamedSharding(mesh, BATCH_SPEC))

    def next(self, state: TrainState, done: int) -> tuple[TrainState, Metrics]:
        """Take the step after `done`, and the outer steps after it. Donates the state."""
        batch = self.run.supplemented(self.run.loader.batch(self.batch_of(done)))
        state, measured = self.step(self.run.mesh, state, batch, done)
        return self._outer_steps(done + 1, state), measured

    def step(
        self, mesh: Mesh, state: TrainState, batch: Batch, done: int
    ) -> tuple[TrainState, Metrics]:
        """Take the step after `done` on a mesh, whose batch may have any size of the run."""
        run = self.run
        cfg, fragment = run.config_of(*batch.tokens.shape), under_way(done, run.cfg)
        key = mesh, cfg, fragment
        if key not in self._programs:
            made: Any = make_train_step(
                cfg, mesh, run.max_segments, requested=("expert_rows",), fragment=fragment
            )
            self._programs[key] = compiled_with(made, self.flags, state, batch)
        return self._programs[key](state, batch)


def compiled_with(program: Any, flags: Mapping[str, Any], *args: Any) -> Any:
    """Return a jitted program, compiled for arguments with some XLA flags, if there are any."""
    return program.lower(*args).compile(dict(flags)) if flags else program


class Replay:
    """A run, ready to repeat one of its steps."""

    def __init__(self, options: ReplayOptions):
        """Find the record and the checkpoint.

        Damaged checkpoints are passed over, with a warning.

        Raises:   ConfigError when the step has no record, or the devices do not fit the mesh.
        """
        rendezvous.require_single_process("jaxpar.checkpoint replay")
        self.number, folder = options.step, Path(options.run)
        self.records = read_recent(folder)
        if not self.records:
            rule = f"has no records of steps: there is no {RECENT_FILE}, or it is empty"
            raise ConfigError("RUN", options.run, rule, "use the folder of a run")
        if not {"batch", "windows", "mesh"} <= self.records.get(self.number, {}).keys():
            rule = f"has no record in {folder / RECENT_FILE}"
            fix = f"use one from {min(self.records)} to {max(self.records)}"
            raise ConfigError("--step", self.number, rule, fix)
        for record in self.records.values():
            check_inputs(record, folder)
        taken_by = checkpoint_with(folder, self.number)
        self.cfg = config_of_step(folder, taken_by, options.code)
        runtime.start(self.cfg)
        require_devices(self.cfg)
        self.begin = checkpoint_before(folder, self.number)
        chosen = None if self.begin else recorded_in(self.cfg, folder, taken_by)
        self.run = Run.open(self.cfg, lambda _: self.begin or None, chosen=chosen)
        self.cfg = self.run.cfg
        if taken_by is not None:
            check_resumable(self.cfg, read_saved(folder, taken_by))
        self.record = self.records[self.number]
        self._steps = StepsAgain(self.run, self.begin, self.records)

    def before(self) -> TrainState:
        """Compute the state before the step, on the host, from the checkpoint before it.

        Logs every step in between whose result differs from its record.
        """
        with stage(f"computing the state before step {self.number}") as told:
            return self._before(told)

    def _before(self, told: Stage) -> TrainState:
        now = self._steps.start()
        for done in range(self.begin, self.number - 1):
            told.at(f"step {done + 1}")
            now, measured = self._steps.next(now, done)
            known = self.records.get(done + 1, {})
            if "bits" in known and known["bits"] != bits_of(measured):
                log(f"step {done + 1}, before it, gives other bits than its record")
        return jax.device_get(now)

    def take(self, state: TrainState, mesh: Mesh, batch: int) -> ReplayedStep:
        """Take the step on the devices of a mesh.

        Args:     state: on the host. batch: the batch of the step, or another.
        """
        with stage(f"taking step {self.number} with batch {batch}"):
            placed = jax.device_put(state, state_shardings(self.cfg, mesh))
            batch_of_step = self._steps.batch_on(mesh, batch)
            after, measured = self._steps.step(mesh, placed, batch_of_step, self.number - 1)
            after = OuterSteps(self.cfg, mesh)(self.number, after)
            sums = fingerprints(after.saved)
            return ReplayedStep(float(measured["loss"]), float(measured["grad_norm"]), sums)

    def elsewhere(self) -> Mesh | None:
        """Make a mesh with every shard on another device; None if there is only one device."""
        used, there = list(self.run.mesh.devices.flat), jax.devices()
        free = [device for device in there if device not in used]
        others = free[: len(used)] if len(free) >= len(used) else [*used[1:], used[0]]
        return make_mesh(self.cfg.parallel, others) if others != used else None

    def is_wrong(self, loss: float) -> bool:
        """Whether a loss is non-finite, or a spike compared with those before the step."""
        g = self.cfg.guard
        before = values_judged(self.records[i] for i in sorted(self.records) if i < self.number)
        window = Window(g.spike_window, g.spike_deviations, before)
        return not math.isfinite(loss) or loss > window.limit()


def bits_of(measured: Mapping[str, Any]) -> dict[str, str]:
    """Return the bits of a step's loss and gradient norm, as in the records."""
    return {name: bits(float(measured[name])) for name in ("loss", "grad_norm")}


def config_of_step(folder: Path, taken_by: int | None, code: Sequence[str] = ()) -> Config:
    """Load the config of a step of a run, for one process.

    The checkpoint before the step may have another config: a resumed run may change its
    learning rate, its length or its mesh.

    Args:     taken_by: the first checkpoint that contains the step; None: the latest start. code:
              files with the code of users' classes.
    """
    if taken_by is not None:
        cfg = saved_config(folder, taken_by)
    else:
        cfg = _latest_config(folder)
    # A cache of compiled programs is code: do not use one named by another's config.
    own = {"run.compilation_cache": Config().run.compilation_cache}
    cfg = replace(cfg, **{"run.dir": str(folder), "checkpoint.resume": "auto"}, **own)
    cfg = with_code(cfg, code)
    check(cfg)
    return in_one_process(cfg)


def checkpoint_with(folder: Path, number: int) -> int | None:
    """Return the first checkpoint that contains a step and has an intact config; None without one.

    Warns of each damaged one that is passed over. It reads no array, which would start JAX.
    """
    return first_whole(
        folder,
        [*(step for step in saved_steps(folder) if step >= number), None],
        lambda step: read_saved(folder, step).step if step is not None else None,
        "The config of a later start is used",
    )


def checkpoint_before(folder: Path, number: int) -> int:
    """Return the last intact checkpoint before a step, or 0: the start of the run.

    Warns of each damaged one that is passed over. Raises:   Unreadable.
    """
    before = [step for step in saved_steps(folder) if 0 < step < number]
    return first_whole(
        folder,
        [*reversed(before), 0],
        lambda step: require_whole(folder, step) if step else 0,
        "The replay begins at an earlier step",
    )


def check_inputs(record: dict[str, Any], folder: Path) -> None:
    """Check the inputs that a record names.

    Raises:   ConfigError for a batch, sequences or mesh that no step has.
    """
    batch, windows = record.get("batch", 0), record.get("windows", [0, 0])
    valid = {
        "batch": type(batch) is int and 0 <= batch <= MAX_INT,
        "windows": isinstance(windows, list)
        and [type(n) for n in windows] == [int, int]
        and 0 <= windows[0] <= windows[1],
        "mesh": isinstance(record.get("mesh", ""), str),
    }
    for name, fine in valid.items():
        if not fine:
            rule = f"has a damaged record of step {record['step']}: {name} is {record[name]!r}"
            fix = "remove the line, and replay another step"
            raise ConfigError("RUN", str(folder / RECENT_FILE), rule, fix)


def devices_of(cfg: Config) -> int:
    """Return the number of devices of a resolved config's mesh."""
    return math.prod(getattr(cfg.parallel, axis) for axis in AXES)


def in_one_process(cfg: Config) -> Config:
    """Return a resolved config with all simulated devices of all processes in this process."""
    return replace(cfg, **{"run.cpu_devices": devices_of(cfg) if cfg.run.cpu_devices else 0})


def require_devices(cfg: Config) -> None:
    """Raises:   ConfigError unless the number of devices is that of the run's mesh."""
    needed, there = devices_of(cfg), jax.device_count()
    if needed != there:
        rule = f"took the step on {needed} devices, but here are {there}"
        more = f"set CUDA_VISIBLE_DEVICES to {needed} of them"
        fix = more if there > needed else f"use a host with {needed} devices"
        raise ConfigError("RUN", cfg.run.dir, rule, fix)


def _latest_config(folder: Path) -> Config:
    """Load the config of a run's latest start.

    Raises:   ConfigError when config.json is missing or damaged.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError("RUN", str(folder), "has no config.json", "use the folder of a run")
    try:
        return from_values(read_json(file, what="it"))
    except UnreadableJson as error:
        rule, fix = f"is damaged: {error}", "fix it, or replay a step before the last checkpoint"
        raise ConfigError("RUN", str(file), rule, fix) from error


def replay(options: ReplayOptions) -> str:
    """Repeat the step, and log and return the verdict, a line.

    Raises:   ConfigError for fewer than one repetition, and as `Replay`.
    """
    check_ranges(options)
    with stage("opening the run and its data"):
        again = Replay(options)
    batch, mesh = again.record["batch"], again.run.mesh
    log(
        f"step {again.number}: batch {batch}, sequences {again.record['windows']}, "
        f"from step {again.begin} on mesh {describe(mesh)}"
    )
    state = again.before()
    same = [again.take(state, mesh, batch) for _ in range(options.repeat)]
    log(f"record      bits {again.record['bits']['loss']} on mesh {again.record['mesh']}")
    for taken in same:
        log(f"again       {taken}")
    other_mesh = again.elsewhere()
    other = again.take(state, other_mesh, batch) if other_mesh is not None else None
    log(f"elsewhere   {other if other else 'skipped: there is no other device'}")
    text = verdict(again, same, other)
    if text == "":
        beside = again.take(state, mesh, batch + 1)
        log(f"next batch  {beside}")
        first, last = again.record["windows"]
        text = f"data: batch {batch} (sequences {first} to {last - 1}) causes it, the next does not"
        if again.is_wrong(beside.loss):
            text = "numerics: another batch also fails from this state (look at the learning rate "
            text += "and the steps before)"
    log(f"verdict     {text}")
    return text


def verdict(again: Replay, same: Sequence[ReplayedStep], other: ReplayedStep | None) -> str:
    """Derive the verdict from the bits; empty if the step is wrong everywhere in the same way."""
    first, recorded = same[0], again.record["bits"]
    if any((taken.bits, taken.state) != (first.bits, first.state) for taken in same):
        exact = again.cfg.compute.attention_deterministic or jax.default_backend() == "cpu"
        doubt = "" if exact else ", or a kernel's order of sums (compute.attention_deterministic)"
        return f"hardware{doubt}: the same step gave other bits on the same devices"
    if other is not None and not _close(first.loss, other.loss, again.cfg.compute.dtype):
        return f"hardware: other devices give loss {other.loss:.6g}, not {first.loss:.6g}"
    loss = again.record["loss"]
    then = math.nan if loss is None else loss
    if recorded != first.bits:
        if not _close(first.loss, then, again.cfg.compute.dtype):
            return f"hardware, transient: it does not happen again (recorded loss {then:.6g})"
        same_mesh = again.record["mesh"] == describe(again.run.mesh)
        if same_mesh and not again.is_wrong(first.loss):
            why = "other devices, versions or flags, or a kernel's order of sums"
            return f"rounding only: other bits than recorded, on the same mesh ({why})"
    if again.is_wrong(first.loss):
        return ""
    how = "bit for bit" if recorded == first.bits else "to rounding, on another mesh"
    return f"nothing wrong: the step repeats {how}"


def _close(a: float, b: float, dtype: str) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) == math.isfinite(b)
    return abs(a - b) <= ROUNDING[dtype] * max(abs(a), abs(b))
