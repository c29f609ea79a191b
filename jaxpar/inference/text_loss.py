"""Computes the loss of a model on a split of a dataset, as evaluations during training do."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.lists.mixture import shares
from jaxpar.config.lists.step_sizes import without_schedules
from jaxpar.data import Loader
from jaxpar.data.sources import check_tokenizers
from jaxpar.inference.load import LoadedParams
from jaxpar.monitoring.evaluations import Score
from jaxpar.runtime.processes import peers
from jaxpar.runtime.stages import stage
from jaxpar.sharding.batch import IGNORED, Batch
from jaxpar.step.evaluating import mean_loss
from jaxpar.step.train_step import make_eval_step


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
    try:
        loader = Loader(cfg, model.mesh, split)
    except ConfigError as error:
        if not error.field.startswith("data."):
            raise
        fix = f"use another --split; or {error.fix}"
        raise ConfigError("--data", error.value, error.rule, fix) from error
    there, known = sum(loader.sequences_per_epoch), model.cfg.evaluation.num_batches
    wanted = sequences or known * model.cfg.train.global_batch_size
    number = min(wanted, there)
    step = _eval_step(cfg, model.mesh, loader.max_documents)
    name = cfg.data.held_out or ", ".join(share.path for share in shares(cfg))
    with stage(f"evaluating on {split} of {name}"):
        loss = mean_loss(step, model.params, _first(loader, number, batch_size))
    if loss is None:
        rule = f"has no labeled token in the first {number} sequences of {split}"
        raise ConfigError("--data", name, rule, "use more --sequences, or other data")
    score = Score.of(loss, loader.bytes_per_token)
    what = f"{number:,} of {there:,} sequences of {cfg.data.seq_len} tokens"
    log(f"{split} loss {score}   {name}, {what}")
    return score


@functools.cache
def _eval_step(cfg: Config, mesh: Mesh, most: int) -> Any:
    """Return the evaluation step, which is compiled once for all checkpoints of a run."""
    return make_eval_step(cfg, mesh, most)


def _with_data(model: LoadedParams, data: str | None, batch_size: int) -> Config:
    """Return the model's config with this dataset and batch size."""
    values = {
        "train.global_batch_size": batch_size,
        "train.batch_schedule": "",
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


def _first(loader: Loader, number: int, batch_size: int) -> Iterator[Batch]:
    """Yield batches of the first sequences. Sequences beyond them have no labels."""
    limit = jax.jit(
        lambda labels, rest: jnp.where(jnp.arange(batch_size)[:, None] < rest, labels, IGNORED),
        out_shardings=loader.abstract_batch().labels.sharding,
    )
    with contextlib.closing(loader.prefetched()) as batches:
        for step, batch in itertools.islice(batches, -(-number // batch_size)):
            rest = number - step * batch_size
            if rest < batch_size:
                batch = dataclasses.replace(batch, labels=limit(batch.labels, rest))
            yield batch
