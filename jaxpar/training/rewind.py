"""After a loss spike: back to the last checkpoint, and on without the batches that led to it."""

from collections.abc import Callable
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxpar import checkpoint
from jaxpar.config import Config
from jaxpar.data import Loader
from jaxpar.data.skips import write_skipped
from jaxpar.runtime import exit_codes
from jaxpar.step.state import TrainState
from jaxpar.training import initial_weights


def rewind(
    cfg: Config,
    mesh: Mesh,
    loader: Loader,
    origin: initial_weights.Origin | None,
    spike: exit_codes.Spike,
    log: Callable[[str], None],
) -> tuple[TrainState, int | None]:
    """The state of the last checkpoint, or of the start.

    The batches are left out by `loader` from now on, and by whatever goes on from this run: they
    are in its folder before anything else happens, and in every checkpoint from here.

    Args:     origin: of the weights, where there is no checkpoint yet.
    Returns:  the state, and the steps that it has taken; None at the start.
    Raises:   BadNumerics when there have been too many rewinds.
    """
    g, skipped = cfg.guard, loader.skipped
    steps = checkpoint.saved_steps(cfg.run.dir)
    if skipped.rewinds >= g.max_rewinds:
        rule = f"the run has gone back {g.max_rewinds} times, as guard.max_rewinds allows"
        raise exit_codes.BadNumerics(
            f"{spike}; {rule}. Checkpoints of earlier steps are untouched."
        )
    last = skipped.batch_of(spike.step)
    first = max(last - g.spike_skip + 1, skipped.batch_of(steps[-1] if steps else 0))
    loader.skipped = skipped.after_rewind(first, last - first + 1)
    if jax.process_index() == 0:
        write_skipped(Path(cfg.run.dir), loader.skipped)
    state, step = initial_or_saved(cfg, mesh, origin, bool(steps), log)
    log(f"rewound to step {step or 0}; batches {first} to {last} are left out")
    return jax.block_until_ready(state), step


def initial_or_saved(
    cfg: Config,
    mesh: Mesh,
    origin: initial_weights.Origin | None,
    saved: bool,
    log: Callable[[str], None],
) -> tuple[TrainState, int | None]:
    """The latest whole checkpoint's state and its step; the initial one's and None without any."""
    if saved:
        return checkpoint.restore_latest(cfg, mesh)
    return initial_weights.state(cfg, mesh, origin, log), None
