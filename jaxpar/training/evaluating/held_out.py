"""The data that a run is evaluated on: its held-out split, its named sets, its test split."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from jax.sharding import Mesh

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.lists.held_out_sets import HELD_OUT, TEST, HeldOutSet, held_out_sets
from jaxpar.config.lists.step_sizes import without_schedules
from jaxpar.data.formats.meta import TRAIN
from jaxpar.data.loader import Loader
from jaxpar.data.pair_loader import open_loader
from jaxpar.data.sources import check_tokenizers

#: The order of tokens along the sequence axis, by their number: as in `Loader`.
type TokenOrder = Callable[[int], np.ndarray | None]


@dataclass(frozen=True)
class HeldOut:
    """The loaders of all evaluations, by name."""

    repeated: Mapping[str, Loader] = field(default_factory=dict)
    """Every `evaluation.every` steps: HELD_OUT, then the names of `evaluation.sets`."""
    last: Mapping[str, Loader] = field(default_factory=dict)
    """After the last step: TEST, with `evaluation.test`."""

    @property
    def loaders(self) -> dict[str, Loader]:
        """All of them."""
        return {**self.repeated, **self.last}


def open_held_out(cfg: Config, mesh: Mesh, order: TokenOrder) -> HeldOut:
    """Open the data of all evaluations, and check that each has labels.

    Args:     order: as in `Loader`.
    Raises:   ConfigError for a set that is missing or has no labels, and for a test split that is
              also evaluated during the run.
    """
    e, repeated, last = cfg.evaluation, dict[str, Loader](), dict[str, Loader]()
    if e.every:
        repeated[HELD_OUT] = open_loader(cfg, mesh, e.split, order)
        repeated |= {s.name: open_set(cfg, mesh, s, order) for s in held_out_sets(cfg)}
    if e.test:
        last[TEST] = open_loader(cfg, mesh, TEST, order)
        _check_apart(last[TEST], repeated)
    found = HeldOut(repeated, last)
    for loader in found.loaders.values():
        check_labels(cfg, loader)
    return found


def open_set(cfg: Config, mesh: Mesh, named: HeldOutSet, order: TokenOrder) -> Loader:
    """Open a set of `evaluation.sets`.

    Raises:   ConfigError that names the set, if it is missing or cannot be used.
    """
    field, given = "evaluation.sets", cfg.evaluation.sets
    alone = without_schedules(replace(cfg, **{"data.held_out": named.path, "distill.cache": ""}))
    if named.split == TRAIN:
        check_tokenizers(cfg, field, given, [named.path])
        only = {"data.path": named.path, "data.mixture": "", "data.mixture_schedule": ""}
        alone = replace(alone, **only)
    try:
        return open_loader(alone, mesh, named.split, order)
    except ConfigError as error:
        if error.field not in ("data.held_out", "data.path"):
            raise
        rule, fix = f"{named.name}: {error.value} {error.rule}", error.fix
        if error.rule.startswith(("has no", "has an empty")):
            fix = f"use {named.name}={named.path}:SPLIT, with a split that it has, or leave it out"
        raise ConfigError(field, given, rule, fix) from error


def check_labels(cfg: Config, loader: Loader) -> None:
    """Check before the run starts that the evaluation batches contain labels.

    Raises:   ConfigError when none of the batches has a label.
    """
    first, most = loader.first_labeled(), cfg.evaluation.num_batches
    if first is not None and first < most:
        return
    what = ", ".join(source.dataset.name for source in loader.sources)
    rule = f"covers only batches of {what} without a labeled token"
    fix = "use --evaluation.every 0"
    if first is not None:
        fix = f"use --evaluation.num-batches {first + 1}, or --evaluation.every 0"
    raise ConfigError("evaluation.num_batches", most, rule, fix)


def _check_apart(test: Loader, others: Mapping[str, Loader]) -> None:
    """Raises:   ConfigError if another evaluation reads a file of the test split: a single file of
    `data.held_out` is any split."""
    files = {source.dataset.file.resolve() for source in test.sources}
    for name, loader in others.items():
        for source in loader.sources:
            if source.dataset.file.resolve() in files:
                rule = f"reads {source.dataset.file}, on which {name} is evaluated during the run"
                fix = "use a folder with a test split, or --evaluation.test False"
                raise ConfigError("evaluation.test", True, rule, fix)
