"""Saving: in the background, with fingerprints; a save that fails does not stop a run at once."""

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

import jaxpar
from jaxpar.checkpoint import integrity
from jaxpar.checkpoint.saved import folder
from jaxpar.config import Config
from jaxpar.data.skips import SkippedBatches
from jaxpar.data.sources import fingerprint
from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes import peers
from jaxpar.sharding.fingerprint import fingerprints
from jaxpar.step.state import TrainState, snapshot

#: Bytes that are on their way from the copy in host memory to the disk; or the largest array's.
IN_FLIGHT = 4 << 30


class SaveFailed(exit_codes.RunError):
    """Checkpoints cannot be written."""


class Checkpointer:
    """Saves the state in the background, and deletes what `checkpoint.keep*` does not keep.

    The loop waits for a copy of the state in pinned host memory, which copy engines make; files are
    written from it. That memory stays taken from one save to the next.

    Use as a context manager: leaving it waits for the last save. When to save is the caller's to
    decide. Every process makes one and makes the same calls on it. It owns the run's folder, and
    sweeps away what killed saves left there.

    Up to `checkpoint.save_failures_allowed` saves in a row may fail, each with a warning; the next
    is due when it is due. What a failed save has written is deleted: it may have filled the disk.
    """

    def __init__(
        self,
        cfg: Config,
        log: Callable[[str], None] = print,
        skipped: SkippedBatches = SkippedBatches(),  # noqa: B008, a constant
        record: Callable[..., None] = lambda event, **more: None,
        asked: Mapping[str, Any] = MappingProxyType({}),
    ):
        """Open the run's folder, making it if need be.

        Args:     log: called from a thread after each save, with its size and speed. skipped:
                  batches that the run leaves out. record: given the events "saved" and
                  "save failed". asked: as in `Saved`.
        Raises:   ConfigError when the data cannot be opened.
        """
        self._cfg, self._log, self._record = cfg, log, record
        self._about = {
            "config": dataclasses.asdict(cfg),
            "dataset": fingerprint(cfg),
            "skipped_batches": skipped.ranges,
            "rewinds": skipped.rewinds,
            "asked": dict(asked),
            "versions": {"jaxpar": jaxpar.__version__, "jax": jax.__version__},
        }
        context = ocp.Context()
        # Weights hardly compress: zstd made them 8% smaller and saves six to ten times slower.
        context.array.saving.use_compression = False
        # In the background, a folder that cannot be made shows as a save that hangs for 5 minutes.
        context.async_options.create_directories_asynchronously = False
        # Orbax would copy all to ordinary host memory before it returns, at 2 GB/s.
        context.memory.is_prioritized_key_fn = lambda path: False
        context.memory.transfer_concurrent_bytes = IN_FLIGHT
        self._orbax = ocp.training.Checkpointer(
            folder(cfg.run.dir),
            context=context,
            preservation_policy=_preservation(cfg),
            cleanup_tmp_directories=True,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: tuple[int, Future[None]] | None = None
        self._failures, self._last_error = 0, ""
        self._half_written: set[int] = set()

    def prepare(self, state: TrainState) -> None:
        """Compile what a save needs, so that the first holds up the loop no longer than others."""
        fingerprints(vars(state))

    def save(self, state: TrainState, step: int, tokens_seen: int) -> bool:
        """Start saving; training may go on, and donate the state, as soon as this returns.

        Args:     state: the running state, sharded as `state.state_shardings`. step: optimizer
                  steps taken. tokens_seen: tokens trained on, counted on the host.
        Returns:  whether a save of this step has begun: not if there is one, or it failed at once.
        Raises:   SaveFailed when more than the allowed number have failed in a row.
        """
        self.wait()
        if step in self.steps():
            return False
        self._half_written.discard(step)  # it may be saved now, after a rewind
        began = time.perf_counter()
        tree = vars(snapshot(state, self._cfg))
        about = self._about | {"tokens_seen": int(tokens_seen)}
        about = integrity.seal(about | {integrity.FINGERPRINTS: fingerprints(tree)})
        try:
            tree = copied_in_all(tree)
            # Without `force`, Orbax has its own opinion on when to save.
            saving = self._orbax.save_async(step, tree, force=True, custom_metadata=about)
        except Exception as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            self._saving = step, failed
            if jax.process_count() == 1:
                self.wait()  # with others, they are to hear of it there
            return False
        held = time.perf_counter() - began
        done = self._thread.submit(self._finish, saving, tree, step, began, held)
        self._saving = step, done
        return True

    def _finish(self, saving: Any, copy: Any, step: int, began: float, held: float) -> None:
        """On the thread: wait for the commit, list the files, and say how it went."""
        saving.result()
        seconds = time.perf_counter() - began
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(copy))
        # At once, whoever still refers to the copy: the next save's has its place then. Without
        # this, resident memory grew from 100 to 167 GB over 24 saves of 64 GB
        # (docs/experiments/checkpoints.md#copy-given-back).
        for leaf in jax.tree.leaves(copy):
            leaf.delete()
        if jax.process_index() == 0:
            try:
                integrity.write_file_list(folder(self._cfg.run.dir) / str(step))
            except OSError as error:  # the checkpoint itself is whole, fingerprints and all
                integrity.warn(f"the files of step {step} could not be listed: {error}")
        rate = num_bytes / 1e9 / seconds
        size = f"{num_bytes / 1e9:.3f} GB in {seconds:.1f} s, {rate:.2f} GB/s"
        self._record("saved", step=step, bytes=num_bytes, seconds=seconds, loop_waited=held)
        self._log(f"saved step {step}: {size}; the loop waited {held:.2f} s")

    def wait(self) -> None:
        """Wait for the save under way, if any.

        Raises:   SaveFailed when it failed, and one too many in a row.
        """
        if self._saving is None:
            return
        (step, future), self._saving = self._saving, None
        error = future.exception()
        if jax.process_count() > 1:
            failed = multihost_utils.process_allgather(np.asarray(error is not None))
            if error is None and np.any(failed):
                error = OSError("another process could not write its part")
        if error is not None:
            self._count(step, error)
        else:
            self._failures, self._last_error = 0, ""
        self._sweep()

    def finish(self) -> None:
        """Wait for the last save.

        Raises:   SaveFailed when it failed, however many may.
        """
        self.wait()
        if self._last_error:
            raise SaveFailed(self._last_error)

    def _count(self, step: int, error: BaseException) -> None:
        """Clean up after a failed save, and warn; or raise, if it was one too many."""
        # Orbax reports a failure once to each thread that asks, and the thread here has asked for
        # itself: the next save would hear of it again. It has also forgotten, not deleted, the
        # checkpoints that this one was to replace.
        with contextlib.suppress(Exception):
            self._orbax.wait()
        with contextlib.suppress(OSError):
            self._orbax.reload()
        self._half_written.add(step)
        self._sweep()
        where = folder(self._cfg.run.dir)
        self._failures += 1
        self._record("save failed", step=step, error=str(error)[:500])
        allowed = self._cfg.checkpoint.save_failures_allowed
        reason = (str(error) or type(error).__name__).partition("\n")[0][:500]
        text = f"step {step} could not be saved in {where}: {reason}"
        self._last_error = f"{text}. Free space or mend the folder; the same command goes on from "
        self._last_error += "the checkpoint before"
        if self._failures > allowed:
            raise SaveFailed(f"{self._last_error} (failure {self._failures} in a row)") from error
        if jax.process_index() == 0:
            more = f"{self._failures} in a row, {allowed} allowed"
            integrity.warn(f"{text}\n           Training goes on without it ({more}).")

    def _sweep(self) -> None:
        """Delete what failed saves have written, now and again: they may be writing still.

        The first array that cannot be written ends a save. Others are on their way even then.
        """
        if jax.process_index() != 0:
            return
        for step in self._half_written:
            for left in folder(self._cfg.run.dir).glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(left, ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps saved or being saved, and kept; ascending. The same in every process."""
        return [saved.step for saved in self._orbax.checkpoints]

    def close(self) -> None:
        """Wait for the save under way, raising as `finish`, and let go of the folder."""
        try:
            self.finish()
        finally:
            self._thread.shutdown()
            try:
                self._orbax.close()
            except OSError as error:  # it keeps errors of its own files until now
                if not self._last_error:  # else `finish` is raising that
                    where = folder(self._cfg.run.dir)
                    raise SaveFailed(f"{where} could not be written to: {error}") from error
            self._sweep()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with contextlib.ExitStack() as stack:
            if error is not None:  # that is what the caller must hear of
                stack.enter_context(contextlib.suppress(SaveFailed))
            self.close()


def copied_to_host(tree: Any) -> Any:
    """The arrays in pinned host memory, sharded as they are; complete when this returns.

    Raises:   jax.errors.JaxRuntimeError when that memory cannot be had.
    """
    to = jax.tree.map(lambda a: a.sharding.with_memory_kind("pinned_host"), tree)
    return jax.block_until_ready(jax.device_put(tree, to))


def copied_in_all(tree: Any) -> Any:
    """`copied_to_host`, in every process or in none: Orbax would wait for one that has no part.

    Raises:   jax.errors.JaxRuntimeError as that; OSError when it is so in another process.
    """
    copied, error = None, None
    try:
        copied = copied_to_host(tree)
    except jax.errors.JaxRuntimeError as out_of_memory:
        error = out_of_memory
    if peers.any_process(error is not None):
        raise error or OSError("another process had no pinned host memory for its part")
    return copied


def _preservation(cfg: Config) -> Any:
    """Which checkpoints stay. (Orbax's default is all of them.)"""
    policies, keep_every = ocp.training.preservation_policies, cfg.checkpoint.keep_every
    multiples = [policies.EveryNSteps(keep_every)] if keep_every else []
    return policies.AnyPreservationPolicy([policies.LatestN(cfg.checkpoint.keep), *multiples])
