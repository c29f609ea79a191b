"""Averages the weights of several checkpoints, of one run or of several runs of one model.

The average of checkpoints near the end of training often has a lower loss than any of them. The
result is a run with only weights, like an imported one: it can be sampled, evaluated, converted,
and trained further by `run.init_from`. Weights are read, verified and averaged box by box.

Source:   Izmailov et al. 2018 (1803.05407); Wortsman et al. 2022 (2203.05482).
"""

import dataclasses
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import jaxpar
from jaxpar.checkpoint.averaging import Source, opened_weights, write_average
from jaxpar.checkpoint.branching import intact
from jaxpar.checkpoint.saved import (
    CARRIED,
    MODEL_FIELDS,
    NO_DATASET,
    Saved,
    changed_fields,
    folder,
    read_whole,
    saved_steps,
)
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.lists.mixture import shares
from jaxpar.config.serialize import from_values, to_json
from jaxpar.data.formats.meta import META_FILE, read_meta
from jaxpar.runtime.files.atomic import new_folder
from jaxpar.runtime.files.new_folder import refuse_used, require_space


@dataclass(frozen=True)
class Part:
    """A checkpoint whose weights are averaged."""

    run: str
    saved: Saved
    share: float
    """Of the average; all shares sum to 1."""

    @property
    def step_folder(self) -> Path:
        """The folder of the checkpoint."""
        return folder(self.run) / str(self.saved.step)

    def __str__(self) -> str:
        return f"step {self.saved.step} of {self.run}"


def merge(
    runs: Sequence[str],
    new: str,
    log: Callable[[str], None],
    *,
    steps: Sequence[int] = (),
    last: int | None = None,
    weights: Sequence[float] = (),
    ema: bool = False,
) -> list[Part]:
    """Write the average of some checkpoints into a new folder, which appears when it is complete.

    Args:     steps: one for each run, or several of a single run. (): the latest intact ones.
              last: number of checkpoints of a single run, the last ones. weights: of the
              checkpoints, relative to one another. (): equal. ema: average the moving averages.
    Returns:  what was averaged.
    Raises:   ConfigError if the new folder is in use, a checkpoint is missing, or the models
              differ; Damaged; Unreadable.
    """
    refuse_used("NEW", Path(new))
    chosen = _chosen(runs, steps, last)
    fractions = _shares(len(chosen), weights)
    found = [_saved(run, step) for run, step in chosen]
    parts = [Part(run, saved, share) for (run, saved), share in zip(found, fractions, strict=True)]
    _check(parts, ema)
    cfg = from_values(parts[0].saved.config)
    sources = [Source(part.step_folder, part.share, part.saved.fingerprints) for part in parts]
    arrays = [opened_weights(source, ema) for source in sources]
    require_space("NEW", Path(new), sum(4 * math.prod(a.shape) for _, a in arrays[0].values()))
    with new_folder(Path(new)) as made:
        write_average(made, sources, arrays, _about(parts, cfg, ema), log)
        (made / "config.json").write_text(to_json(replace(cfg, **{"run.dir": new})))
        if (Path(parts[0].run) / CARRIED).is_dir():
            shutil.copytree(Path(parts[0].run) / CARRIED, made / CARRIED)
    what = ", ".join(f"{part.share:.2%} {part}" for part in parts)
    log(f"merge      {new}: {'the moving averages of ' * ema}{what}")
    return parts


def _chosen(
    runs: Sequence[str], steps: Sequence[int], last: int | None
) -> list[tuple[str, int | None]]:
    """Return the run and the step of each checkpoint; None for the latest intact one.

    Raises:   ConfigError for steps that do not match the runs, and for too few checkpoints.
    """
    if last is not None:
        if len(runs) > 1 or steps:
            rule, fix = "takes the checkpoints of a single run", "name one run, without --steps"
            raise ConfigError("--last", last, rule, fix)
        there = saved_steps(runs[0])
        if len(there) < last:
            rule = f"{runs[0]} has {len(there)} checkpoints"
            fix = f"use --last {len(there)}, or keep more: --checkpoint.keep"
            raise ConfigError("--last", last, rule, fix)
        return [(runs[0], step) for step in there[-last:]]
    if not steps:
        return [(run, None) for run in runs]
    if len(runs) == 1:
        return [(runs[0], step) for step in steps]
    if len(steps) != len(runs):
        rule = f"must have one step for each of the {len(runs)} runs, or several for one run"
        raise ConfigError("--steps", " ".join(map(str, steps)), rule, "give one for each")
    return list(zip(runs, steps, strict=True))


def _shares(number: int, weights: Sequence[float]) -> list[float]:
    """Return the share of each checkpoint.

    Raises:   ConfigError unless there is one weight of at least 0 for each, and some are above 0.
    """
    if not weights:
        return [1 / number] * number
    given = " ".join(f"{weight:g}" for weight in weights)
    if len(weights) != number:
        rule = f"must be one number for each of the {number} checkpoints"
        raise ConfigError("--weights", given, rule, "give one for each, or none for equal weights")
    if not all(math.isfinite(w) and w >= 0 for w in weights) or not 0 < sum(weights) < math.inf:
        rule = "must be finite numbers of at least 0, not all of them 0"
        raise ConfigError("--weights", given, rule, "use --weights " + " ".join(["1"] * number))
    return [weight / sum(weights) for weight in weights]


def _saved(run: str, step: int | None) -> tuple[str, Saved]:
    return run, read_whole(run, step, lambda at: intact(run, at))


def _check(parts: Sequence[Part], ema: bool) -> None:
    """Check that the checkpoints can be averaged.

    Raises:   ConfigError for too few, for another model or tokenizer, and for adapters.
    """
    first, places = parts[0], [part.step_folder.resolve() for part in parts]
    if len(parts) == 1 and not ema:
        fix = "name another run, use --last 2, or --ema for the moving average of one"
        raise ConfigError("RUN", first.run, "is a single checkpoint", fix)
    twice = next((part for part, at in zip(parts, places, strict=True) if places.count(at) > 1), "")
    if twice:
        raise ConfigError("RUN", parts[0].run, f"{twice} is named twice", "name it once")
    cfg = from_values(first.saved.config)
    if cfg.lora.rank:
        rule = "has adapters, whose average is not that of the weights with them"
        fix = "merge them into the weights first: python -m jaxpar.convert to-hf, then from-hf"
        raise ConfigError("RUN", first.run, rule, fix)
    for part in parts:
        changed = changed_fields(cfg, part.saved)
        differing = [path for path in (*MODEL_FIELDS, "lora.rank") if path in changed]
        if differing:
            path = differing[0]
            there, here = changed[path]
            rule = f"{part} is another model than {first}: {path} {there}, not {here}"
            raise ConfigError("RUN", part.run, rule, "average runs of one model")
        if ema and not part.saved.has_average:
            rule = f"{part} has no moving average of the weights"
            raise ConfigError("--ema", ema, rule, "leave the option out")
    known = {name: run for part in parts for name, run in _tokenizers(part)}
    if len(known) > 1:
        (_, one), (_, other) = list(known.items())[:2]
        rule = f"was trained on another tokenizer than {one}"
        raise ConfigError("RUN", other, rule, "average runs of one tokenizer")


def _tokenizers(part: Part) -> list[tuple[str, str]]:
    """Return the fingerprint of the tokenizer of a run's data, if the data is there."""
    paths = [Path(share.path) for share in shares(from_values(part.saved.config))]
    metas = [read_meta(path) for path in paths if (path / META_FILE).is_file()]
    return [(m.tokenizer_fingerprint, part.run) for m in metas if m.tokenizer_fingerprint]


def _about(parts: Sequence[Part], cfg: Config, ema: bool) -> dict[str, Any]:
    """Return the fields of `Saved` of the result."""
    return {
        "merged_from": [
            {"run": part.run, "step": part.saved.step, "share": part.share, "ema": ema}
            for part in parts
        ],
        "config": dataclasses.asdict(cfg),
        "dataset": NO_DATASET,
        "versions": {"jaxpar": jaxpar.__version__, "jax": jax.__version__},
        "tokens_seen": 0,
    }
