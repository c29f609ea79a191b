"""Checks a run, opens its folder, and trains it to the end."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from jaxpar.checkpoint.saved import starting_step
from jaxpar.config import Config, replace
from jaxpar.config.serialize import to_json
from jaxpar.data.skips import SKIPPED_FILE
from jaxpar.monitoring.profiler import profile_on_signal
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files.lock import WAIT_SECONDS, RunLock, RunLocked
from jaxpar.runtime.processes import peers
from jaxpar.runtime.signals import output_may_be_lost
from jaxpar.runtime.stages import stage
from jaxpar.runtime.watchdog import Watchdog
from jaxpar.step.state import abstract_logical
from jaxpar.training import elastic, manifest
from jaxpar.training.callbacks import own
from jaxpar.training.chosen import choose_together
from jaxpar.training.loop import train
from jaxpar.training.manifest import RunRecords
from jaxpar.training.run import Run

if TYPE_CHECKING:
    from jaxpar.memory_checkpoint.restoring import FoundCopy
    from jaxpar.stores.lease import Lease
    from jaxpar.training.object_store import RunInStore


def checked(cfg: Config, certificate: str = "") -> Run:
    """Return the run, after every process has checked it and all agree that it is the same run.

    Args:     certificate: as for `Run.open`.
    """
    own.check(cfg)
    seconds = cfg.cluster.slow_seconds or 1e6
    with stage("planning the layout"):
        laid_out = elastic.choose_layout(cfg, seconds)
    with stage("opening the data and checking the run"):
        memory = None
        copies: list[FoundCopy] = []
        if laid_out.checkpoint.memory:
            from jaxpar.memory_checkpoint.places import place_of
            from jaxpar.memory_checkpoint.plan import plan_copies
            from jaxpar.memory_checkpoint.restoring import find

            place = lambda: place_of(laid_out)  # noqa: E731
            memory = peers.all_or_none("memory of hosts", seconds, place)
            copies = find(laid_out, memory)
        chosen = choose_together(laid_out, seconds, copies)
        make = lambda: Run.open(  # noqa: E731
            laid_out, copies=copies, chosen=chosen, certificate=certificate
        )
        run = peers.all_or_none("checks", seconds, make)
    if cfg.parallel.auto:
        asked = {**run.asked, "parallel.auto": cfg.parallel.auto}
        run = dataclasses.replace(run, asked=asked)
    # Beside a store, each host may have its folder elsewhere.
    alike = replace(run.cfg, **{"run.dir": ""}) if run.cfg.run.store else run.cfg
    about = lambda: f"{to_json(alike)} {run.first_step} {run.weights_from} {jax.__version__}"  # noqa: E731
    peers.check_same("config", about, seconds)
    peers.check_same("data set", lambda: run.content, seconds)
    peers.check_same(SKIPPED_FILE, lambda: repr(run.loader.skipped), seconds)
    if memory is not None:
        logical = abstract_logical(run.cfg, run.mesh).saved
        run = dataclasses.replace(run, memory=plan_copies(run.cfg, memory, logical, seconds))
    return run


@contextlib.contextmanager
def opened(run: Run, environment: list[str], lease: "Lease | None" = None) -> Iterator[RunRecords]:
    """Lock the run folder for a block, and write the run's manifest, in process 0.

    Args:     lease: on the run's store, if it has one.
    Raises:   RunLocked; RunError when the folder has changed since the checks; in the other
              processes, PeerFailed for either.
    """
    seconds = run.cfg.cluster.slow_seconds or 1e6

    def take() -> tuple[RunLock | None, RunRecords]:
        if peers.rank() != 0:
            return None, RunRecords(run.dir)
        lock = RunLock(run.dir, min(WAIT_SECONDS, seconds / 2))  # before the watchdog's limit
        records = RunRecords(run.dir, lock, lease)
        try:
            if starting_step(run.cfg) != run.on_disk:
                rule = "has a new checkpoint from a run that has just ended"
                raise exit_codes.RunError(f"run.dir {run.cfg.run.dir} {rule}. Fix: start again")
            manifest.write(run, [*environment, *lock.warnings], records=records)
        except BaseException:
            lock.release()
            raise
        return lock, records

    lock, records = peers.all_or_none("run folder", seconds, take)
    with lock or contextlib.nullcontext():
        yield records


def _store_of(cfg: Config) -> contextlib.AbstractContextManager["RunInStore | None"]:
    """Open the store of a run, if it has one. Only such a run imports what uploads it."""
    if not cfg.run.store:
        return contextlib.nullcontext()
    from jaxpar.training.object_store import stored

    return stored(cfg)


def run_to_end(cfg: Config, environment: list[str], certificate: str = "") -> int:
    """Check the run, open its folder and train, under the watchdog. Returns the exit code.

    Args:     certificate: as for `Run.open`.
    Raises:   RunLocked, among others, after the watchdog has stopped: it would otherwise write into
              the folder of the run that holds the lock.
    """
    c = cfg.cluster
    watchdog = Watchdog(cfg.run.dir, c.hang_seconds, c.slow_seconds)
    with _store_of(cfg) as store, output_may_be_lost(), profile_on_signal(), watchdog as watch:
        run = checked(cfg, certificate)
        if store is not None:
            store.begin()
        with contextlib.ExitStack() as stack:
            try:
                lease = store.lease if store is not None else None
                records = stack.enter_context(opened(run, environment, lease))
            except (RunLocked, peers.PeerFailed) as error:
                taken = error
            else:
                return train(run, watch, records, store)
    raise taken
