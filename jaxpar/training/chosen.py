"""Weights that a run takes from other runs: chosen once, recorded, and required from then on.

The other run may go on meanwhile: an hour later, or on another host, its newest checkpoint is
another one. So process 0 chooses a step, and tells the others. Every checkpoint records the choice
(`Saved.weights_from`). A run that resumes from it, or a branch, needs the same weights again,
whatever has been saved since.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.saved import (
    Saved,
    damage,
    read_saved,
    read_whole,
    saved_steps,
    starting_step,
)
from jaxpar.config import Config, ConfigError, flag, value_of
from jaxpar.config.json_reader import UnreadableJson, read_json_object
from jaxpar.config.schema.features import objective_in
from jaxpar.runtime.processes import peers

if TYPE_CHECKING:
    from jaxpar.memory_checkpoint.restoring import FoundCopy

#: The field of the initial weights.
INITIAL = "run.init_from"


@dataclass(frozen=True)
class Chosen:
    """Weights that a field names, and which of them a run uses."""

    run: str
    """The run or the published model, as named; a model of the Hub with its commit."""
    step: int | None = None
    """The checkpoint; None for a published model, and for a run whose results a cache has."""
    weights: str = ""
    """Hash of model and weights (`digest`); empty if unknown."""

    def __str__(self) -> str:
        return self.run if self.step is None else f"{self.run}, step {self.step}"


#: The chosen weights, by field.
type Choice = Mapping[str, Chosen]


def choose(cfg: Config, saved: Saved | None) -> dict[str, Chosen]:
    """Choose the weights of other runs for a run: those that it has used so far, or the newest.

    Reads no weight. A new run whose `run.init_from` is neither a run nor published gets a choice
    without a step, which `initial_weights.find` refuses.

    Args:     saved: the state that the run resumes from; None for a new run.
    Raises:   ConfigError when a run does not have the weights any more, or never had any.
    """
    recorded, chosen = of_saved(saved), {}
    if INITIAL in recorded:  # an objective may need them again
        chosen[INITIAL] = recorded[INITIAL]
    elif saved is None and cfg.run.init_from:
        chosen[INITIAL] = newest(INITIAL, cfg.run.init_from)
    of = objective_in(cfg)
    return chosen | ({} if of is None else of.weights(cfg, recorded))


def choose_together(
    cfg: Config, seconds: float, copies: "Sequence[FoundCopy]" = (), in_folder: bool = True
) -> dict[str, Chosen]:
    """`choose` in process 0, for all processes, which call this together.

    Args:     copies, in_folder: as for `Run`.
    Raises:   as `choose`, and as `starting_step`; in the others, PeerFailed.
    """

    def work() -> Choice:
        if copies:
            return choose(cfg, copies[0].saved)
        step = starting_step(cfg) if in_folder else None
        saved = None if step is None else read_saved(cfg.run.dir, step)
        return choose(cfg, saved)

    return of_first_process(work, seconds)


def of_first_process(work: Callable[[], Choice], seconds: float) -> dict[str, Chosen]:
    """Return in every process what `work` returns in process 0. All call this together."""
    text = peers.of_first("weights of other runs", lambda: json.dumps(to_json(work())), seconds)
    return from_json(json.loads(text))


def recorded_in(cfg: Config, folder: Path, step: int | None) -> dict[str, Chosen]:
    """Find the weights again that a run has begun with, to repeat its first steps.

    Args:     cfg: of the run. step: the checkpoint that records them. None: manifest.json does.
    Raises:   ConfigError as `found_again`.
    """
    recorded = of_saved(None if step is None else read_saved(folder, step))
    if not recorded:
        with contextlib.suppress(OSError, UnreadableJson):
            recorded = from_json(read_json_object(folder / "manifest.json").get("weights_from", {}))
    of = objective_in(cfg)
    in_files = of is not None and of.in_files
    return {
        field: one
        if one.step is None or (in_files and field != INITIAL)
        else found_again(field, cfg, one)
        for field, one in recorded.items()
    }


def to_json(chosen: Choice) -> dict[str, dict[str, Any]]:
    """Return a choice as in `Saved.weights_from`."""
    return {field: dataclasses.asdict(one) for field, one in chosen.items()}


def from_json(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Chosen]:
    """Read `to_json`. Fields that a later version may have added are ignored."""
    names = [f.name for f in dataclasses.fields(Chosen)]
    return {
        field: Chosen(**{name: one[name] for name in names if name in one})
        for field, one in values.items()
    }


def of_saved(saved: Saved | None) -> dict[str, Chosen]:
    """Return the choice that a checkpoint records."""
    return {} if saved is None else from_json(saved.weights_from)


def folder_of(field: str, chosen: Chosen) -> Path:
    """Return the folder of the run with the chosen step, as this process sees it.

    Raises:   ConfigError when the step is not there, or has other weights; Damaged; Unreadable.
    """
    from jaxpar.stores.reading import run_at

    folder = run_at(field, chosen.run, step=chosen.step)
    assert folder is not None and chosen.step is not None
    steps = saved_steps(folder)
    if chosen.step not in steps:
        rule = f"has no checkpoint of step {chosen.step} in {process()}: there {_are(steps)}"
        raise ConfigError(field, chosen.run, rule, "let every host see the same folder")
    if chosen.weights and digest(folder, chosen.step) != chosen.weights:
        rule = f"has other weights at step {chosen.step} in {process()} than where it was chosen"
        raise ConfigError(field, chosen.run, rule, "let every host see the same folder")
    return folder


def process() -> str:
    """Return the name of this process, for messages."""
    return peers.process_name(peers.rank())


def found_again(field: str, cfg: Config, recorded: Chosen) -> Chosen:
    """Find the recorded weights in the run that a field names now, at whatever step.

    Raises:   ConfigError when they are not there any more.
    """
    named = value_of(cfg, field) or recorded.run
    folder = run_of(field, named, recorded.step)
    steps = [] if folder is None else saved_steps(folder)
    step = step_with(folder, recorded.weights, recorded.step)
    if step is not None:
        return Chosen(named, step, recorded.weights)
    rule = f"does not have the weights that this run has used since its start, {recorded}: "
    if recorded.step in steps:
        rule += f"its step {recorded.step} is damaged, or of another run"
    else:
        rule += f"there {_are(steps)}"
    fix = "bring that checkpoint back; or start another run from the weights of this one: "
    fix += f"{flag('run.dir', cfg.run.dir.rstrip('/') + '_2')} {flag(INITIAL, cfg.run.dir)}"
    raise ConfigError(field, named, rule, fix)


def initial_again(cfg: Config, saved: Saved | None) -> dict[str, Chosen]:
    """Find the weights that a run began with, which resumes and needs them again.

    Raises:   as `found_again`.
    """
    recorded = of_saved(saved).get(INITIAL)
    if recorded is not None and recorded.step is not None:
        return {INITIAL: found_again(INITIAL, cfg, recorded)}
    if recorded is not None:
        named = cfg.run.init_from or recorded.run
        is_commit_of = recorded.run.startswith(f"{named}@")
        return {INITIAL: recorded if is_commit_of else dataclasses.replace(recorded, run=named)}
    return {}


def digest(folder: Path, step: int) -> str:
    """Return a hash of the model and the weights of a checkpoint, from its metadata."""
    saved = read_saved(folder, step)
    weights = {k: v for k, v in sorted(saved.fingerprints.items()) if k.startswith("params/")}
    parts: list[Any] = [weights, saved.config["model"]]
    if lora := saved.config.get("lora"):
        parts.append(lora)  # the adapters are merged by its scale
    return hash_of(parts)


def hash_of(parts: Any) -> str:
    """Return the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def newest(field: str, named: str, published: bool = True) -> Chosen:
    """Choose the newest intact checkpoint of a run, or a published model at its commit.

    Args:     published: whether it may be no run.
    Raises:   ConfigError for one that may not.
    """
    folder = run_of(field, named, None)
    if folder is not None and folder.is_dir() and saved_steps(folder):
        step = read_whole(folder, None, lambda step: step)
        return Chosen(named, step, digest(folder, step))
    if not published:
        rule, fix = "is not a run with a checkpoint", "use the folder of a run"
        raise ConfigError(field, named, rule, fix)
    from jaxpar.runtime import hub

    if hub.is_name(named):
        from jaxpar.stores.reading import find_model

        return Chosen(find_model(named, field, ("config.json",), "is no model", "").name)
    return Chosen(named)


def run_of(field: str, named: str, step: int | None) -> Path | None:
    """As `run_at` with a step, or with the newest if a store does not have that step any more."""
    from jaxpar.stores.reading import run_at

    try:
        return run_at(field, named, step=step)
    except ConfigError as error:
        if step is None or error.field != "step":
            raise
        return run_at(field, named)


def step_with(folder: Path | None, weights: str, first: int | None = None) -> int | None:
    """Return the newest intact checkpoint that has these weights, or `first` if it has them.

    Returns:  None if there is none.
    """
    if folder is None:
        return None
    steps = saved_steps(folder)[::-1]
    for step in sorted(steps, key=lambda step: step != first):
        with contextlib.suppress(Damaged, ConfigError):
            if not damage(folder, step) and digest(folder, step) == weights:
                return step
    return None


def _are(steps: list[int]) -> str:
    if not steps:
        return "is none"
    return f"{'are' if len(steps) > 1 else 'is'} {', '.join(map(str, steps))}"
