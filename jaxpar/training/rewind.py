"""Rewinds a run after a loss spike: to the last checkpoint, skipping the batches before it."""

from collections.abc import Callable
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxpar import checkpoint
from jaxpar.config import Config
from jaxpar.data.loader import Loader
from jaxpar.data.skips import write_skipped
from jaxpar.runtime import exit_codes
from jaxpar.step.state import TrainState
from jaxpar.training import initial_weights


def rewind(
    cfg: Config,
    mesh: Mesh,
    loader: Loader,
    origin: Callable[[], initial_weights.Origin | None],
    spike: exit_codes.Spike,
    log: Callable[[str], None],
) -> tuple[TrainState, int | None]:
    """Return the state of the last checkpoint, or the initial one, and skip the bad batches.

    `loader` skips the batches that led to the spike from now on. So does any run that resumes from
    this one: the list is written to the run folder first, and to every later checkpoint.

    Args:     origin: finds the initial weights, used if there is no checkpoint yet.
    Returns:  the state, and the number of steps it has taken; None for the initial state.
    Raises:   BadNumerics after too many rewinds.
    """
    g, skipped = cfg.guard, loader.skipped
    steps = checkpoint.saved_steps(cfg.run.dir)
    if skipped.rewinds >= g.max_rewinds:
        rule = f"the run has rewound {g.max_rewinds} times, the limit of guard.max_rewinds"
        raise exit_codes.BadNumerics(
            f"{spike}; {rule}. Checkpoints of earlier steps are untouched."
        )
    last = skipped.batch_of(spike.step)
    first = max(last - g.spike_skip + 1, skipped.batch_of(steps[-1] if steps else 0))
    loader.skipped = skipped.after_rewind(first, last - first + 1)
    if jax.process_index() == 0:
        write_skipped(Path(cfg.run.dir), loader.skipped)
    state, step = initial_or_saved(cfg, mesh, origin, bool(steps), log)
    log(f"rewound to step {step or 0}; batches {first} to {last} are skipped")
    return jax.block_until_ready(state), step


def initial_or_saved(
    cfg: Config,
    mesh: Mesh,
    origin: Callable[[], initial_weights.Origin | None],
    saved: bool,
    log: Callable[[str], None],
) -> tuple[TrainState, int | None]:
    """Return the latest intact state and its step; without a checkpoint, the initial and None."""
    if saved:
        return checkpoint.restore_latest(cfg, mesh)
    return initial_weights.state(cfg, mesh, origin(), log), None
