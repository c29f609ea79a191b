"""Finds where two runs part that should agree, and which single difference explains it.

Both runs are taken again from where they last agreed, step by step, until their bits differ. In
that step, probes at the points of each layer and the gradients say where its results part first:
in which microbatch, layer and direction. Then the step of A is repeated with one difference of B at
a time. The one that gives B's bits explains it.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.certification.layer_distances import (
    LayerDistances,
    StepPlace,
    distances_by_layer,
    parts_at,
)
from jaxpar.certification.options import BisectOptions
from jaxpar.certification.replay import (
    StepsAgain,
    bits_of,
    checkpoint_with,
    config_of_step,
    devices_of,
    in_one_process,
)
from jaxpar.certification.step_inputs import (
    RunDifference,
    StepInputs,
    Stepper,
    arrays_of,
    differing,
    differing_fields,
    flat_state,
    mixed,
    on_host,
    repeated,
    xla_options,
)
from jaxpar.certification.traces import Arrays
from jaxpar.checkpoint.loading import restore
from jaxpar.checkpoint.saved import read_saved, saved_steps
from jaxpar.config import Config, ConfigError, replace, value_of
from jaxpar.config.config_file import load_config
from jaxpar.config.json_reader import UnreadableJson, read_json_object
from jaxpar.config.schema.features import objectives
from jaxpar.config.validate import check, resolve
from jaxpar.monitoring.certificate import Conditions, conditions_of
from jaxpar.monitoring.recent_steps import read_recent
from jaxpar.runtime import start as runtime
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.stages import stage
from jaxpar.step.state import TrainState
from jaxpar.training.chosen import recorded_in
from jaxpar.training.run import Run

# ---------------------------------------------------------------------------------- what is found


@dataclass(frozen=True)
class Tried:
    """The step of A with one difference of B.

    Args:
        same: whether it gives the bits of B.
        distance: of loss, relative, from B's.
    """

    difference: RunDifference
    same: bool
    distance: float
    reason: str = ""


@dataclass(frozen=True)
class Bisection:
    """Where A and B part, and why.

    Args:
        a, b: their names.
        step: the first whose results differ, from 1; 0 if none does.
        begin: the step from which both were repeated. last: the last that was compared.
        microbatch, layer, point, direction: the first place in that step; None and "" if unknown.
        values: loss and gradient norm of A and of B.
        differences: all of them. tried: with which the step was repeated.
        cause: those that explain it, most often one; empty if none does.
        notes: what else was found.
    """

    a: str
    b: str
    step: int
    begin: int = 0
    last: int = 0
    microbatch: int | None = None
    layer: str = ""
    point: str = ""
    direction: str = ""
    values: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    differences: tuple[RunDifference, ...] = ()
    tried: tuple[Tried, ...] = ()
    cause: tuple[RunDifference, ...] = ()
    layers: tuple[LayerDistances, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The first place, in words."""
        parts = [f"microbatch {self.microbatch}"] if self.microbatch is not None else []
        parts += [part for part in (self.layer, self.point, self.direction) if part]
        return ", ".join(parts)

    @property
    def verdict(self) -> str:
        """The cause, a line."""
        if not self.step:
            return f"none: the same bits up to step {self.last}"
        untried = [d for d in self.differences if d.reason]
        if any(one.same for one in self.tried):
            return ", or ".join(map(str, self.cause))
        if self.cause:
            return "together: " + "; ".join(map(str, self.cause))
        if untried:
            return "none that can be tried here; left are " + "; ".join(map(str, untried))
        return "none: A with every difference of B still gives other bits than B"


# ---------------------------------------------------------------------------------- the two sides


@dataclass(frozen=True, eq=False)
class RunSide:
    """A run or a config, ready to take its steps."""

    name: str
    folder: Path | None
    """None for a config."""
    steps: StepsAgain
    conditions: dict[str, Any]
    """Of the run, from its manifest; those of this process for a config."""

    @property
    def cfg(self) -> Config:
        return self.steps.run.cfg

    @property
    def saved(self) -> list[int]:
        """The steps of its checkpoints."""
        return saved_steps(self.folder) if self.folder is not None else []


def _is_run(name: str) -> bool:
    return Path(name, "config.json").is_file()


def _config(name: str, number: int, like: Config | None, code: Sequence[str]) -> Config:
    """Return the config of a step of a run, or a config for the devices of a run."""
    if _is_run(name):
        return config_of_step(Path(name), checkpoint_with(Path(name), number), code)
    cfg = load_config(name)
    assert like is not None
    if cfg.run.cpu_devices == 0 and like.run.cpu_devices:
        cfg = replace(cfg, **{"run.cpu_devices": like.run.cpu_devices})
    check(cfg)
    return in_one_process(resolve(cfg, cfg.run.cpu_devices or devices_of(like)))


def _refuse(name: str, cfg: Config) -> None:
    """Raises:   ConfigError for a run whose steps read more than a state and a batch."""
    for section in (*objectives(), "diloco"):
        if value_of(cfg, section):
            rule = f"of {name} is set, and --bisect takes no steps of it"
            fix = f"use python -m jaxpar.checkpoint replay {name} --step N"
            raise ConfigError(section, "set", rule, fix)


def _begin_together(a: str, b: str) -> int:
    """Return the last checkpoint that both runs have, with the same bits; 0 for the start."""
    if not (_is_run(a) and _is_run(b)):
        return 0
    both = sorted({*saved_steps(a)} & {*saved_steps(b)}, reverse=True)
    for step in both:
        one, other = (read_saved(name, step).fingerprints for name in (a, b))
        if one == other:
            return step
    return 0


def _first_parted(a: str, b: str, after: int) -> int | None:
    """Return the first step after `after` whose records differ; None if none does."""
    one, other = (read_recent(Path(name)) for name in (a, b))
    for step in sorted(one.keys() & other.keys()):
        if step > after and one[step]["bits"] != other[step]["bits"]:
            return step
    return None


def _open(name: str, cfg: Config, begin: int, flags: Mapping[str, Any]) -> RunSide:
    folder = Path(name) if _is_run(name) else None
    devices = jax.devices()[: devices_of(cfg)]
    start = lambda _: begin or None  # noqa: E731
    chosen = None
    if folder is not None and not begin:
        chosen = recorded_in(cfg, folder, checkpoint_with(folder, 1))
    in_folder = folder is not None
    run = Run.open(cfg, start, chosen=chosen, devices=devices, in_folder=in_folder)
    records = read_recent(folder) if folder is not None else {}
    steps = StepsAgain(run, begin, records, flags)
    return RunSide(name, folder, steps, _conditions(folder, cfg))


def _conditions(folder: Path | None, cfg: Config) -> dict[str, Any]:
    """Return the conditions that a run has recorded; empty if it has not."""
    if folder is None:
        return dataclasses.asdict(conditions_of(cfg))
    try:
        found = read_json_object(folder / "manifest.json").get("conditions", {})
    except (OSError, UnreadableJson):
        return {}
    return found if isinstance(found, dict) else {}


# -------------------------------------------------------------------------------------- bisection


class Bisect:
    """Two sides, from where they last agreed to the step in which they part."""

    def __init__(self, options: BisectOptions):
        """Open both.

        Raises:   ConfigError if A is no run, or the devices are too few.
        """
        rendezvous.require_single_process("jaxpar.certify --bisect")
        if not _is_run(options.a):
            rule = "is not a run's folder"
            raise ConfigError("A", options.a, rule, "name a run first, then a run or a config")
        self.options, names = options, (options.a, options.b)
        self.begin = _begin_together(*names)
        self._parted = _first_parted(*names, self.begin) if _is_run(options.b) else None
        number = self._parted or self.begin + 1
        first = _config(options.a, number, None, options.code)
        configs = first, _config(options.b, number, first, options.code)
        for name, cfg in zip(names, configs, strict=True):
            _refuse(name, cfg)
        simulated = max(cfg.run.cpu_devices for cfg in configs)
        runtime.start(replace(first, **{"run.cpu_devices": simulated}))
        if (most := max(map(devices_of, configs))) > jax.device_count():
            rule = f"has a mesh of {most} devices, but here are {jax.device_count()}"
            raise ConfigError("B", options.b, rule, f"use a host with {most} devices")
        known = [
            _conditions(Path(name) if _is_run(name) else None, cfg)
            for name, cfg in zip(names, configs, strict=True)
        ]
        here = xla_options(conditions_of(first).flags)
        self.a, self.b = (
            _open(name, cfg, self.begin, _beside(here, xla_options(about.get("flags", {})), name))
            for name, cfg, about in zip(names, configs, known, strict=True)
        )
        self.stepper, self.notes = Stepper(), list[str]()

    def find(self) -> Bisection:
        """Return where the two part, and why."""
        found = self._part_ways()
        if found is None:
            return self._result(step=0, last=self.last)
        done, states = found
        a, b = (self._inputs(one, done, s) for one, s in zip((self.a, self.b), states, strict=True))
        if done == 0 and not (self.a.steps.run.origin or self.b.steps.run.origin):
            a, b = (dataclasses.replace(given, state=None) for given in (a, b))
        with stage(f"repeating step {done + 1} of both"):
            (bits, after, mine), (others, theirs, other) = map(self.stepper.take, (a, b))
            again, after_again, _ = self.stepper.take(a)
        if again != bits or differing(after, after_again):
            self.notes.append(
                "A's step gives other bits each time: a kernel's order of sums (set "
                "compute.attention_deterministic), or the hardware"
            )
        values = {name: (mine[name], other[name]) for name in mine}
        differences = tuple(self._differences(a, b))
        place: StepPlace | None = None
        microbatch: int | None = None
        layers: tuple[LayerDistances, ...] = ()
        batch = next((d for d in differences if d.kind == "batch"), None)
        if batch is not None:
            microbatch = self._microbatch_of_tokens(a, b)
        elif a.cfg.lora or b.cfg.lora:
            self.notes.append("layers with adapters have no probes: the first place is unknown")
        elif a.cfg.model.num_layers == b.cfg.model.num_layers:
            place, microbatch, layers = self._place(a, b)
        if place is None and batch is None:
            place = _in_update(after, theirs)
        tried, cause = self._explain(a, b, differences, others, theirs)
        named = a.cfg.model.layers
        at = place.layer if place is not None else None
        return self._result(
            step=done + 1,
            last=done + 1,
            microbatch=microbatch,
            layer="" if at is None else f"layer {at} ({named[at].name})",
            point=place.point if place is not None else "tokens" if batch is not None else "",
            direction=place.direction if place is not None else "input" if batch else "",
            values=values,
            differences=differences,
            tried=tried,
            cause=cause,
            layers=layers,
        )

    def _result(self, **more: Any) -> Bisection:
        names = self.options.a, self.options.b
        return Bisection(*names, begin=self.begin, notes=tuple(self.notes), **more)

    # ---------------------------------------------------------------- the first step that differs

    def _part_ways(self) -> tuple[int, tuple[TrainState, TrainState]] | None:
        """Take the steps of both until their bits differ.

        Returns:  steps done before the one that differs, and the states before it, logical, on the
                  host; None if none differs.
        """
        sides = self.a, self.b
        records = [step for side in sides for step in side.steps.records]
        last = min(self.begin + self.options.steps, max(records, default=self.begin))
        parted = self._parted
        last = min(last, parted or last)
        self.last = max(last, self.begin)
        with stage(f"repeating steps from {self.begin}") as told:
            now = [side.steps.start() for side in sides]
            for done in range(self.begin, last):
                told.at(f"step {done + 1}")
                now = [self._as_saved(side, s, done) for side, s in zip(sides, now, strict=True)]
                a, b = (on_host(s, side.cfg) for side, s in zip(sides, now, strict=True))
                if differing(flat_state(a), flat_state(b)):
                    return done, (a, b)
                taken = [side.steps.next(s, done) for side, s in zip(sides, now, strict=True)]
                now, measured = [state for state, _ in taken], [bits_of(m) for _, m in taken]
                for side, found in zip(sides, measured, strict=True):
                    self._compare_with_record(side, done + 1, found)
                after = [arrays_of(s, side.cfg) for side, s in zip(sides, now, strict=True)]
                if measured[0] != measured[1] or differing(*after):
                    return done, (a, b)
        if parted:
            self.notes.append(
                f"the records of step {parted} differ, but both give the same bits here: other "
                "versions, flags or GPUs, or the hardware"
            )
        return None

    def _compare_with_record(self, side: RunSide, step: int, found: dict[str, str]) -> None:
        known = side.steps.records.get(step)
        if known is not None and known["bits"] != found and len(self.notes) < _MOST_NOTES:
            self.notes.append(f"step {step} of {side.name} gives other bits than its record")

    def _as_saved(self, side: RunSide, state: TrainState, done: int) -> TrainState:
        """Return the state of a side's checkpoint, if it has one with other bits than its steps
        have given: a run that resumed went on with it."""
        if done == self.begin or done not in side.saved:
            return state
        saved = restore(side.cfg, side.steps.run.mesh, done)
        wrong = differing(arrays_of(state, side.cfg), arrays_of(saved, side.cfg))
        if wrong:
            self.notes.append(
                f"the checkpoint of step {done} of {side.name} is not the state that its steps "
                f"give: {wrong}"
            )
        return saved if wrong else state

    # ------------------------------------------------------------------------------ what differs

    def _inputs(self, side: RunSide, done: int, state: TrainState) -> StepInputs:
        run = side.steps.run
        return StepInputs(
            run.cfg, side.steps.flags, side.steps.batch_of(done), state, run.max_segments
        )

    def _differences(self, a: StepInputs, b: StepInputs) -> Iterator[RunDifference]:
        """Yield all differences of the inputs of a step."""
        arrays = [flat_state(given.state) for given in (a, b) if given.state is not None]
        if arrays and (what := differing(*arrays)):
            yield RunDifference("weights", what, "its own", "its own")
        fields = list(differing_fields(a.cfg, b.cfg))
        by_field = any(field.name.startswith(("data.", "train.seed")) for field in fields)
        if not by_field and self._first_row(a, b) is not None:
            paths = [given.cfg.data.path for given in (a, b)]
            of = [f" of {path}" * (paths[0] != paths[1]) for path in paths]
            yield RunDifference("batch", "batch", f"{a.batch}{of[0]}", f"{b.batch}{of[1]}")
        for name in sorted({*a.flags, *b.flags}):
            one, other = (str(side.flags.get(name, "not set")) for side in (a, b))
            if one != other:
                yield RunDifference("flag", name, one, other)
        yield from fields
        yield from self._differing_conditions()

    def _differing_conditions(self) -> Iterator[RunDifference]:
        """Yield what a process has once: versions, the GPU, variables of the environment."""
        one, other = self.a.conditions, self.b.conditions
        if not (one and other):
            return
        reason = "it belongs to a process"
        for field in dataclasses.fields(Conditions):
            x, y = one.get(field.name), other.get(field.name)
            if x == y or field.name in ("commit", "python", "jaxpar"):
                continue
            if isinstance(x, dict) and isinstance(y, dict):
                kind = "flag" if field.name == "flags" else "version"
                for name in sorted({*x, *y}):
                    if x.get(name) != y.get(name) and not name.startswith("xla_"):
                        shown = [str(v.get(name, "not set"))[:12] for v in (x, y)]
                        what = name if kind == "flag" else f"of {name}"
                        yield RunDifference(kind, what, shown[0], shown[1], reason)
            else:
                yield RunDifference("version", f"of {field.name}", str(x), str(y), reason=reason)

    def _first_row(self, a: StepInputs, b: StepInputs) -> int | None:
        """Return the first row of the batches, in text order, that differs."""
        pairs = [
            side.steps.run.loader.host_rows(given.batch, np.arange(_rows(given.cfg)))
            for side, given in ((self.a, a), (self.b, b))
        ]
        one, other = (jax.tree.leaves(batch) for batch in pairs)
        if [x.shape for x in one] != [y.shape for y in other]:
            return 0
        wrong = np.zeros(len(one[0]), bool)
        for x, y in zip(one, other, strict=True):
            wrong |= (x != y).reshape(len(x), -1).any(axis=1)
        return int(np.argmax(wrong)) if wrong.any() else None

    # ------------------------------------------------------------------------ where it differs

    def _microbatch_of_tokens(self, a: StepInputs, b: StepInputs) -> int | None:
        row = self._first_row(a, b)
        return None if row is None else _microbatch_of(a.cfg, row)

    def _place(
        self, a: StepInputs, b: StepInputs
    ) -> tuple[StepPlace | None, int | None, tuple[LayerDistances, ...]]:
        """Return the first place that differs, its microbatch, and the distances by layer."""
        with stage("looking for the first layer that differs"):
            batches = [self.stepper.batch(given) for given in (a, b)]
            seen = [self.stepper.watched(g, x) for g, x in zip((a, b), batches, strict=True)]
            layers = distances_by_layer(a.cfg, *seen)
            place, number = parts_at(a.cfg, *seen), None
            many = a.cfg.parallel.num_microbatches
            if place is None or many == 1:
                return place, None if place is None else 0, layers
            for index in range(many):
                alone = [
                    self.stepper.watched(given, repeated(batch, given.cfg, index, many))
                    for given, batch in zip((a, b), batches, strict=True)
                ]
                if (found := parts_at(a.cfg, *alone)) is not None:
                    place, number = found, index
                    break
            return place, number, layers

    # ------------------------------------------------------------------------- what explains it

    def _explain(
        self,
        a: StepInputs,
        b: StepInputs,
        differences: Sequence[RunDifference],
        bits: dict[str, str],
        after: Arrays,
    ) -> tuple[tuple[Tried, ...], tuple[RunDifference, ...]]:
        """Repeat A's step with one difference of B at a time, and with all if none explains it."""
        possible = [one for one in differences if not one.reason]
        loss = np.frombuffer(bytes.fromhex(bits["loss"]), ">f4")[0]

        def gives_bits(some: Sequence[RunDifference]) -> tuple[bool, float]:
            found, state, values = self.stepper.take(mixed(a, b, some))
            off = abs(values["loss"] - float(loss)) / max(abs(float(loss)), 1e-30)
            return found == bits and not differing(state, after), off

        tried = []
        for one in possible:
            with stage(f"repeating the step with {one.kind} {one.name} of B"):
                try:
                    tried.append(Tried(one, *gives_bits([one])))
                except Exception as error:
                    why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    tried.append(Tried(one, False, math.nan, why))
        alone = tuple(one.difference for one in tried if one.same)
        if alone or len(possible) < 2:
            return tuple(tried), alone
        with stage("repeating the step with several differences of B"):
            left = list(possible)
            if not gives_bits(left)[0]:
                return tuple(tried), ()
            for one in possible:
                fewer = [other for other in left if other is not one]
                if fewer and gives_bits(fewer)[0]:
                    left = fewer
        return tuple(tried), tuple(left)


#: Most notes.
_MOST_NOTES = 20


def _beside(here: Mapping[str, Any], flags: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the flags of a side beside those of this process.

    Raises:   ConfigError for a flag of this process that the side did not have.
    """
    for flag, value in here.items():
        if flags.get(flag) != value:
            rule = f"sets {flag}, which {name} did not"
            raise ConfigError("XLA_FLAGS", f"--{flag}={value}", rule, "unset it")
    return {flag: value for flag, value in flags.items() if here.get(flag) != value}


def _rows(cfg: Config) -> int:
    return cfg.train.global_batch_size


def _in_update(a: Arrays, b: Arrays) -> StepPlace | None:
    what = differing(a, b)
    return StepPlace("update", None, what.split(",")[0]) if what else None


def _microbatch_of(cfg: Config, row: int) -> int:
    p = cfg.parallel
    local = _rows(cfg) // (p.replica * p.data * p.expert)
    return row % local // (local // p.num_microbatches)


def described(found: Bisection) -> str:
    """Return the result as the lines of the console."""
    lines = [f"A           {found.a}", f"B           {found.b}"]
    if found.step:
        values = [f"{n} {x:.9g} and {y:.9g}" for n, (x, y) in found.values.items()]
        lines.append(f"first step  {found.step}: {', '.join(values)}")
        lines.append(f"first place {found.place or 'unknown'}")
        for one in found.tried:
            how = "the bits of B" if one.same else one.reason or "other bits than B"
            lines.append(f"tried       {one.difference}: {how}")
        lines += [f"not tried   {d}: {d.reason}" for d in found.differences if d.reason]
    lines += [f"note        {note}" for note in found.notes]
    return "\n".join([*lines, f"cause       {found.verdict}"])


def bisect(options: BisectOptions) -> Bisection:
    """Find where two runs part, print it, and return it."""
    found = Bisect(options).find()
    print(described(found), flush=True)
    return found
