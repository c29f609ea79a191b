"""The reference of preference tuning: log probabilities of responses under the initial weights.

They are computed once, in a pass over the pairs before the first step, and kept in the run's folder
(RUN/reference.train.npz, reference.val.npz). Training then needs no second model in memory. A
resumed run reads them; one whose files are missing, such as a branch, computes them again.
"""

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpar.config import Config
from jaxpar.config.schema.features import objective_in
from jaxpar.data.pairs import PairLoader, places_of
from jaxpar.execution.decisions import Execution
from jaxpar.parallel.context import order_of
from jaxpar.runtime.files import atomic
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.stages import stage
from jaxpar.step.forward import make_score_step
from jaxpar.step.state import TrainState
from jaxpar.training import initial_weights
from jaxpar.training.run import Run
from jaxpar.training.supplement import Supplement


class Reference(Supplement):
    """Gives the loaders of pairs the log probabilities under the initial weights."""

    name = "reference"

    def load(self, run: Run, initial: TrainState | None) -> None:
        def params() -> Any:
            origin = run.initial.again()
            made = initial_weights.state(run.cfg, run.mesh, origin, log).params
            run.initial.check_published(made)
            return made

        if initial is not None:
            run.initial.check_published(initial.params)
        loaders = [split for split in run.splits if isinstance(split, PairLoader)]
        given = params if initial is None else lambda: initial.params
        of_run = run.dir, run.execution, run.mesh, run.max_segments
        with stage("computing the log probabilities of the reference"):
            prepare_reference(loaders, *of_run, run.initial.identity, given, log)


def reference_file(folder: Path, split: str) -> Path:
    """Return the file of a split's log probabilities."""
    return folder / f"reference.{split}.npz"


def prepare_reference(
    loaders: list[PairLoader],
    folder: Path,
    ex: Execution,
    mesh: Mesh,
    max_segments: int,
    weights: str,
    initial_params: Callable[[], Any],
    log: Callable[[str], None],
) -> None:
    """Set `PairLoader.reference` of each loader, from its file or by a pass over its pairs.

    All processes call it. Process 0 writes the files.

    Args:     weights: identifies the initial weights. initial_params: makes them; called at most
              once, in all processes, if one of them lacks a file.
    """
    params = None
    for loader in loaders:
        path = reference_file(folder, loader.split)
        identity = _identity(ex.cfg, loader, weights)
        found = _read(path, identity, loader.dataset.num_tokens)
        # Scoring is a collective, and each host may have its own folder.
        if peers.any_process(found is None):
            params = initial_params() if params is None else params
            found = score(loader, ex, mesh, max_segments, params)
            if jax.process_index() == 0:
                _write(path, identity, found)
            what = f"{len(loader.rows.kept):,} pairs of the {loader.split} split"
            log(f"reference  log probabilities of {what} under the initial weights: {path}")
        loader.reference = found


def score(
    loader: PairLoader, ex: Execution, mesh: Mesh, max_segments: int, params: Any
) -> np.ndarray:
    """Compute the log probability of each target of a split.

    Returns:  float32 [tokens of the split], 0 for tokens that are no targets of a row.
    """
    cfg, rows = ex.cfg, loader.rows
    program = make_score_step(cfg, mesh, max_segments, ex)
    order, size = order_of(cfg), cfg.train.global_batch_size
    in_order = slice(None) if order is None else np.argsort(order)
    scores = np.zeros(loader.dataset.num_tokens, np.float32)
    total = loader.sequences_per_epoch[0]
    for first in range(0, total, size):
        numbers = np.arange(first, first + size) % total  # the last batch repeats the first rows
        found = np.asarray(program(params, loader.batch_of_rows(numbers)))[:, in_order]
        for number, of_row in zip(range(first, min(first + size, total)), found, strict=False):
            for _, part, place in places_of(loader.dataset, rows, number):
                scores[part] = of_row[place]
    return scores


def _identity(cfg: Config, loader: PairLoader, weights: str) -> str:
    """Return a hash of what the log probabilities depend on, up to rounding."""
    model = {name: str(value) for name, value in sorted(vars(cfg.model).items())}
    parts = [loader.dataset.fingerprint, loader.split, weights, cfg.train.seed, model]
    too_long = objective_in(cfg).too_long
    parts += [too_long, too_long == "drop" and cfg.data.seq_len]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read(path: Path, identity: str, num_tokens: int) -> np.ndarray | None:
    """Read the log probabilities of a split; None if there are none of this identity."""
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as file:
        if str(file["identity"]) != identity or file["scores"].shape != (num_tokens,):
            return None
        return file["scores"]


def _write(path: Path, identity: str, scores: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, identity=np.array(identity), scores=scores)
    atomic.write(path, buffer.getvalue())
