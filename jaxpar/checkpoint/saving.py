"""Saves checkpoints in the background, with fingerprints. A run survives a few failed saves."""

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

import jaxpar
from jaxpar.checkpoint import integrity
from jaxpar.checkpoint.best import Best
from jaxpar.checkpoint.copies import HostCopy, copied_in_all
from jaxpar.checkpoint.orbax_errors import errors_file, errors_to_file
from jaxpar.checkpoint.saved import METADATA, checkpoint_folder, saved_steps
from jaxpar.config import Config
from jaxpar.config.layout.layer_split import is_equal
from jaxpar.config.values import to_values
from jaxpar.data.skips import SkippedBatches
from jaxpar.data.sources import fingerprint
from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes import peers
from jaxpar.runtime.terminal import warn
from jaxpar.runtime.units import transfer
from jaxpar.sharding.fingerprint import fingerprints
from jaxpar.step.state import TrainState, snapshot

#: Bytes in flight from a copy in XLA's host memory to the disk, unless one array is larger.
IN_FLIGHT = 4 << 30


class SaveFailed(exit_codes.RunError):
    """Checkpoints cannot be written."""


def metadata_of_run(
    cfg: Config,
    skipped: SkippedBatches,
    asked: Mapping[str, Any],
    weights_from: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the fields of `Saved` that depend on no step.

    Raises:   ConfigError when the data cannot be opened.
    """
    return {
        "config": to_values(cfg),
        "dataset": fingerprint(cfg),
        "skipped_batches": skipped.ranges,
        "rewinds": skipped.rewinds,
        "asked": dict(asked),
        "weights_from": dict(weights_from),
        "versions": {"jaxpar": jaxpar.__version__, "jax": jax.__version__},
    }


class Checkpointer:
    """Saves the state in the background, and deletes checkpoints according to `checkpoint.keep*`.

    The loop waits until the copy engines have copied the state to pinned host memory, which is kept
    between saves (`copies.py`); files are written from this copy.

    Use as a context manager: on exit, it waits for the last save. The caller decides when to save.
    Every process makes one and makes the same calls on it. It owns the run's folder, and removes
    the remains of killed saves.

    Up to `checkpoint.save_failures_allowed` saves in a row may fail, each with a warning; there is
    no extra attempt before the next regular save. The files of a failed save are deleted, because
    they may have filled the disk.
    """

    def __init__(
        self,
        cfg: Config,
        log: Callable[[str], None] = print,
        skipped: SkippedBatches = SkippedBatches(),  # noqa: B008, a constant
        record: Callable[..., None] = lambda event, **more: None,
        asked: Mapping[str, Any] = MappingProxyType({}),
        host: HostCopy | None = None,
        own: Path | None = None,
        weights_from: Mapping[str, Any] = MappingProxyType({}),
    ):
        """Open the run's folder, creating it if necessary.

        Args:     log: called from a thread after each save, with its size and speed. skipped:
                  batches that the run skips. record: called with the events "saved" and
                  "save failed". asked: as in `Saved`. host: memory for copies of the state. None:
                  the first save allocates it, and `close` frees it. own: a folder in place of the
                  run's, in which this process saves its shards, and no other process anything.
                  weights_from: as in `Saved`.
        Raises:   ConfigError when the data cannot be opened.
        """
        self._cfg, self._log, self._record, self._host = cfg, log, record, host
        self._dir = checkpoint_folder(own or cfg.run.dir)
        #: Whether this process is the one that writes to its folder what is written once.
        self._is_first = own is not None or jax.process_index() == 0
        self._about = metadata_of_run(cfg, skipped, asked, weights_from)
        self._best = _KeepBest()
        context = ocp.Context()
        # Weights hardly compress: zstd made them 8% smaller and saves six to ten times slower.
        context.array.saving.use_compression = False
        # If a folder cannot be created in the background, the save hangs for 5 minutes.
        context.async_options.create_directories_asynchronously = False
        # Otherwise the copies of an array in one process would be written in parts.
        context.array.saving.use_replica_parallel = jax.process_count() > 1 and own is None
        if own is not None:
            context.multiprocessing.primary_host = None  # each process finishes its own folder
        by_xla = host is not None and host.by_xla
        context.array.saving.enable_pinned_host_transfer = by_xla
        if by_xla:
            # Orbax copies from XLA's memory to pageable memory, by default before it returns, at 2
            # GB/s. It writes from our memory as it is.
            context.memory.is_prioritized_key_fn = lambda path: False
            context.memory.transfer_concurrent_bytes = IN_FLIGHT
        self._orbax = ocp.training.Checkpointer(
            self._dir,
            context=context,
            preservation_policy=_preservation(cfg, self._best),
            cleanup_tmp_directories=True,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._own = contextlib.ExitStack()
        self._own.enter_context(errors_to_file(cfg.run.dir))
        self._saving: tuple[int, Future[None]] | None = None
        self._failures, self._last_error = 0, ""
        self._half_written: set[int] = set()

    def prepare(self, state: TrainState) -> None:
        """Run the programs of a save once, so that the first one delays the loop no more than
        others."""
        fingerprints((state if is_equal(self._cfg) else snapshot(state, self._cfg)).saved)

    def save(
        self,
        state: TrainState,
        step: int,
        tokens_seen: int,
        best: Best | None = None,
        callbacks: Mapping[str, str] = MappingProxyType({}),
        position: str = "",
    ) -> bool:
        """Start saving. Training may continue, and donate the state, as soon as this returns.

        Args:     state: the running state, sharded as `state.state_shardings`. step: optimizer
                  steps taken. tokens_seen: tokens trained on, counted on the host. best: the best
              evaluation so far, whose checkpoint is kept. callbacks, position: as in `Saved`.
        Returns:  whether a save has begun: not if the step is saved already, or if the save failed
                  immediately.
        Raises:   SaveFailed when more saves in a row have failed than allowed.
        """
        self.wait()
        self._forget_deleted()
        if step in self.steps():
            return False
        self._half_written.discard(step)  # it may be saved now, after a rewind
        began = time.perf_counter()
        tree = snapshot(state, self._cfg).saved
        about = self._about | {"tokens_seen": int(tokens_seen), "callbacks": dict(callbacks)}
        about["position"] = position
        if best is not None:
            about["best"] = dataclasses.asdict(best)
            self.keep_best(best)
        about = integrity.seal(about | {integrity.FINGERPRINTS: fingerprints(tree)})
        try:
            tree = copied_in_all(self._host_for(tree), tree)
            # Without `force`, Orbax would decide whether to save.
            saving = self._orbax.save_async(step, tree, force=True, custom_metadata=about)
        except Exception as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            self._saving = step, failed
            if jax.process_count() == 1:
                self.wait()  # several processes exchange the failure in `wait`
            return False
        held = time.perf_counter() - began
        done = self._thread.submit(self._finish, saving, tree, step, began, held)
        self._saving = step, done
        return True

    def keep_best(self, best: Best | None) -> None:
        """Keep the checkpoint of the best evaluation so far, if there is one."""
        self._best.before, self._best.step = self._best.step, best.step if best else 0

    def _host_for(self, tree: Any) -> HostCopy:
        if self._host is None:
            self._host = self._own.enter_context(HostCopy(tree))
        return self._host

    def _forget_deleted(self) -> None:
        """Warn of checkpoints that others have deleted, and do not count on them any more."""
        gone: list[int] = []
        if self._is_first:
            with contextlib.suppress(integrity.Unreadable):  # an error of the machine
                there = saved_steps(self._dir.parent)
                gone = [step for step in self.steps() if step not in there]
        if not peers.any_process(bool(gone)):
            return
        if gone:
            steps = ", ".join(map(str, gone))
            warn(f"checkpoints of {self._dir} were deleted during the run: step {steps}")
        self._orbax.reload()

    def _finish(self, saving: Any, copy: Any, step: int, began: float, held: float) -> None:
        """On the thread: wait for the commit, write the list of files, and log the result."""
        saving.result()
        seconds = time.perf_counter() - began
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(copy))
        # Free the copy now, even if something still refers to it, so that the next save can reuse
        # its memory. Without this, resident memory grew from 100 to 167 GB over 24 saves of 64 GB
        # (docs/experiments.md#copy-given-back).
        for leaf in jax.tree.leaves(copy):
            leaf.delete()
        if self._is_first:
            if not (self._dir / str(step) / METADATA).is_file():
                raise OSError("its files were deleted while it was written")
            try:
                integrity.write_file_list(self._dir / str(step))
            except OSError as error:  # the checkpoint itself is complete, with fingerprints
                warn(f"the file list of step {step} could not be written: {error}")
        self._record("saved", step=step, bytes=num_bytes, seconds=seconds, loop_waited=held)
        self._log(
            f"saved step {step}: {transfer(num_bytes, seconds)}; the loop waited {held:.2f} s"
        )

    def wait(self) -> None:
        """Wait for the current save, if any.

        Raises:   SaveFailed when it failed, and more in a row have failed than allowed.
        """
        if self._saving is None:
            return
        (step, future), self._saving = self._saving, None
        error = future.exception()
        if jax.process_count() > 1:
            failed = multihost_utils.process_allgather(np.asarray(error is not None))
            if error is None and np.any(failed):
                error = OSError("another process could not write its shards")
        if error is not None:
            self._count(step, error)
        else:
            self._failures, self._last_error = 0, ""
        self._sweep()

    def finish(self) -> None:
        """Wait for the last save.

        Raises:   SaveFailed when it failed, regardless of the number of failures allowed.
        """
        self.wait()
        if self._last_error:
            raise SaveFailed(self._last_error)

    def _count(self, step: int, error: BaseException) -> None:
        """Clean up after a failed save. Warn, or raise if there are too many failures in a row."""
        # Orbax reports a failure once to each thread that waits. Only the background thread has
        # waited so far, so wait here, or the next save would raise it again. Orbax has also dropped
        # the checkpoints that this one would have replaced, without deleting them: reload.
        with contextlib.suppress(Exception):
            self._orbax.wait()
        with contextlib.suppress(OSError):
            self._orbax.reload()
        self._half_written.add(step)
        if step == self._best.step:  # the one before is kept instead
            self._best.step = self._best.before
        self._sweep()
        self._failures += 1
        self._record("save failed", step=step, error=str(error)[:500])
        allowed = self._cfg.checkpoint.save_failures_allowed
        reason = (str(error) or type(error).__name__).partition("\n")[0][:500]
        text = f"step {step} could not be saved in {self._dir}: {reason}"
        self._last_error = f"{text}. Free space or fix the folder; the same command resumes from "
        self._last_error += "the previous checkpoint"
        if self._failures > allowed:
            raise SaveFailed(f"{self._last_error} (failure {self._failures} in a row)") from error
        if jax.process_index() == 0:
            more = f"{self._failures} in a row, {allowed} allowed"
            detail = errors_file(self._cfg.run.dir)
            at = f" Details: {detail}" if detail.is_file() else ""
            warn(f"{text}\n           Training continues without it ({more}).{at}")

    def _sweep(self) -> None:
        """Delete the files of failed saves. Called repeatedly, because they may still be writing.

        A save fails at the first array that cannot be written, while others are in flight.
        """
        if not self._is_first:
            return
        for step in sorted(self._half_written):
            for left in sorted(self._dir.glob(f"{step}.orbax-checkpoint-tmp*")):
                shutil.rmtree(left, ignore_errors=True)

    def steps(self) -> list[int]:
        """Return the steps saved or being saved, ascending. The same in every process."""
        return [saved.step for saved in self._orbax.checkpoints]

    def close(self) -> None:
        """Wait for the current save, raising as `finish`, and release the folder."""
        try:
            self.finish()
        finally:
            self._thread.shutdown()
            try:
                self._orbax.close()
            except OSError as error:  # Orbax reports errors of its own files only now
                if not self._last_error:  # otherwise `finish` raises that one
                    raise SaveFailed(f"{self._dir} could not be written to: {error}") from error
            finally:
                self._own.close()
            self._sweep()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with contextlib.ExitStack() as stack:
            if error is not None:  # do not replace the caller's exception
                stack.enter_context(contextlib.suppress(SaveFailed))
            self.close()


class _KeepBest:
    """A policy that keeps one step: that of the best evaluation."""

    def __init__(self) -> None:
        self.step, self.before = 0, 0

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        return [one.step == self.step for one in checkpoints]


def _preservation(cfg: Config, best: _KeepBest) -> Any:
    """Return the policy that selects the checkpoints to keep. (Orbax keeps all by default.)"""
    policies, keep_every = ocp.training.preservation_policies, cfg.checkpoint.keep_every
    multiples = [policies.EveryNSteps(keep_every)] if keep_every else []
    return policies.AnyPreservationPolicy([policies.LatestN(cfg.checkpoint.keep), *multiples, best])
