"""Computes the cross entropy of a model on a split of a dataset."""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.lists.mixture import shares
from jaxpar.config.lists.step_sizes import without_schedules
from jaxpar.data.formats.meta import SPLITS
from jaxpar.data.loader import Loader
from jaxpar.data.sources import check_tokenizers
from jaxpar.inference.load import LoadedParams
from jaxpar.monitoring.evaluations import Score
from jaxpar.runtime.processes import peers
from jaxpar.runtime.stages import stage
from jaxpar.step.evaluating import mean_loss
from jaxpar.step.train_step import make_eval_step

#: Fields whose value is the location of data.
PLACES = ("data.path", "data.held_out", "data.mixture")

#: An option of `jaxpar.train`, or of the preparation of data that exists already.
OF_TRAINING = re.compile(r"--[a-z]+\.[a-z]|--split")


def text_loss(
    model: LoadedParams,
    data: str | None,
    split: str,
    sequences: int | None,
    batch_size: int,
    log: Callable[[str], None] = peers.log,
) -> Score:
    """Compute the loss over the first sequences of a split, and log it.

    Args:     data: a dataset. None: that of the run. sequences: None for as many as in an
              evaluation of the run. batch_size: sequences at a time.
    Raises:   ConfigError for data that is missing or cannot be used.
    """
    cfg = without_schedules(_with_data(model, data, batch_size))
    loader = _open(cfg, model.mesh, split)
    there, known = sum(loader.sequences_per_epoch), model.cfg.evaluation.num_batches
    numbers = loader.first_sequences(sequences or known * model.cfg.train.global_batch_size)
    step = _eval_step(cfg, model.mesh, loader.max_documents)
    name = ", ".join(source.dataset.name for source in loader.sources)
    batches = contextlib.closing(loader.once(numbers))
    with stage(f"evaluating on {split} of {name}"), batches as some:
        loss = mean_loss(step, model.params, some)
    if loss is None:
        rule = f"has no labeled token in the first {len(numbers)} sequences of {split}"
        raise ConfigError("--data", name, rule, "use more --sequences, or other data")
    score = Score.of(loss, loader.bytes_per_token(numbers))
    what = f"{len(numbers):,} of {there:,} sequences of {cfg.data.seq_len} tokens"
    log(f"{split} loss {score}   {name}, {what}")
    return score


def _open(cfg: Config, mesh: Mesh, split: str) -> Loader:
    """Open a split. Raises:   ConfigError about --data, with a fix among this command's options."""
    try:
        return Loader(cfg, mesh, split)
    except ConfigError as error:
        fix = error.fix
        if OF_TRAINING.search(fix):
            others = [name for name in SPLITS if name != split and _opens(cfg, mesh, name)]
            fix = "use --data FOLDER with a dataset that `python -m jaxpar.data prepare` made"
            fix = f"use --split {others[-1]}" if others else fix
        value, rule = error.value, error.rule
        if error.field not in PLACES:
            value, rule = cfg.data.held_out or _paths(cfg), f"{error.field} = {value}: {rule}"
        raise ConfigError("--data", value, rule, fix) from error


def _opens(cfg: Config, mesh: Mesh, split: str) -> bool:
    try:
        Loader(cfg, mesh, split)
    except ConfigError:
        return False
    return True


def _paths(cfg: Config) -> str:
    return ", ".join(share.path for share in shares(cfg))


@functools.cache
def _eval_step(cfg: Config, mesh: Mesh, most: int) -> Any:
    """Return the evaluation step, which is compiled once for all checkpoints of a run."""
    return make_eval_step(cfg, mesh, most)


def _with_data(model: LoadedParams, data: str | None, batch_size: int) -> Config:
    """Return the model's config with this dataset and batch size."""
    values = {
        "train.global_batch_size": batch_size,
        "train.batch_schedule": "",
        "train.loss": None,
        "data.length_schedule": "",
    }
    if data is None:
        if model.step is None:
            rule = "is needed: a published model has no data of its own"
            raise ConfigError("--data", None, rule, "use --data FOLDER, made with its tokenizer")
        return replace(model.cfg, **values)
    if model.step is not None:
        check_tokenizers(model.cfg, "--data", data, [data])
    only = {"data.path": data, "data.mixture": "", "data.mixture_schedule": "", "data.held_out": ""}
    return replace(model.cfg, **values, **only)
