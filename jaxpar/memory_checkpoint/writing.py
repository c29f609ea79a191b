"""Copies the state into files in the memory of the host, and sends them to other hosts."""

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.checkpoint import integrity
from jaxpar.checkpoint.best import Best
from jaxpar.checkpoint.saving import metadata_of_run
from jaxpar.config import Config, declared, present
from jaxpar.data.skips import SkippedBatches
from jaxpar.memory_checkpoint.client import LIMITS_FILE, HostLost, Limits
from jaxpar.memory_checkpoint.places import (
    MIRRORED,
    OWN,
    Group,
    PieceFile,
    delete_files,
    read_name,
)
from jaxpar.memory_checkpoint.plan import AT_A_TIME, CopyPlan, free_bytes
from jaxpar.memory_checkpoint.slots import Slot
from jaxpar.runtime.files import atomic
from jaxpar.runtime.processes import peers
from jaxpar.runtime.terminal import warn
from jaxpar.sharding.fingerprint import fingerprints
from jaxpar.step.state import TrainState, snapshot

#: Seconds to wait for the other processes at the start.
WAIT_SECONDS = 3600.0

#: Bytes of the indices of the files that a host receives, at most.
_ROOM = 64 << 20

#: Errors of a copy that do not end the run.
_OF_COPIES = (OSError, MemoryError)


class _Copy(NamedTuple):
    """A copy that is being completed on the thread, or has been."""

    group: Group
    slot: Slot
    done: Future[None]


class MemoryCheckpointer:
    """Copies the state every `checkpoint.memory.every` steps. A context manager.

    Every process makes one and makes the same calls on it. The loop waits while the devices' copy
    engines move the state into the mapped memory of a file; a thread then computes checksums,
    completes the file and sends it. Of the two slots of each process, one holds the last copy that
    is complete in all processes, and the other is written next.
    """

    def __init__(
        self,
        cfg: Config,
        plan: CopyPlan,
        restored: Group | None,
        log: Callable[[str], None],
        asked: Mapping[str, Any] = MappingProxyType({}),
        weights_from: Mapping[str, Any] = MappingProxyType({}),
    ):
        """Delete what earlier processes of the run have left, except the copy that was restored.

        Args:     restored: the copy from which the run resumed. log:
                  called in every process, also from a thread. asked, weights_from: as in `Saved`.
        """
        self._cfg, self._plan, self._log = cfg, plan, log
        self._about = metadata_of_run(cfg, SkippedBatches(), asked, weights_from)
        self._restored = restored
        self._folder = plan.place.folder
        if plan.first_here:
            for kind in (OWN, MIRRORED):
                keep = lambda file: file is not None and file.group == restored  # noqa: E731
                delete_files(self._folder, kind, keep)
        own = secrets.token_hex(4)
        self.session = peers.exchange("session of copies", own, WAIT_SECONDS)[0]
        if plan.first_here and plan.received:
            # Before the first copy, for which all processes meet: no host receives any before.
            limits = limits_of(self.session, cfg.train.num_steps, plan.received)
            atomic.write(self._folder / LIMITS_FILE, declared.to_json(limits).encode())
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="memory checkpoint")
        rank = peers.rank()
        self._slots = [Slot(self._folder, plan.pieces, rank, i) for i in range(AT_A_TIME)]
        self._good: _Copy | None = None
        self._last: _Copy | None = None
        self._number = 0
        #: Called with the events "copied", "copy skipped" and "copy failed".
        self.record: Callable[..., None] = lambda event, **more: None

    def begin(self) -> None:
        """Start to allocate memory, on a thread.

        If there is no room beside the copy that was restored, a slot follows once it is deleted.
        """
        room = not self._restored or free_bytes(self._folder) >= self._plan.needed
        for slot in self._slots if room else self._slots[:1]:
            slot.begin(self._threads)

    def due(self, step: int) -> bool:
        """Whether a copy is due after a step."""
        return step % present(self._cfg.checkpoint.memory).every == 0

    def save(
        self,
        state: TrainState,
        step: int,
        tokens_seen: int,
        skipped: SkippedBatches,
        best: Best | None = None,
        callbacks: Mapping[str, str] = MappingProxyType({}),
        position: str = "",
    ) -> bool:
        """Copy the state. Training may continue, and donate it, as soon as this returns.

        If a process is still busy with the last copy, none is made in any, and that is logged.

        Args:     as `Checkpointer.save`. skipped: batches that the run skips.
        Returns:  whether a copy has been made.
        """
        began = time.perf_counter()
        slot, why = self._next_slot()
        if slot is None:
            self._log(f"no copy of step {step} in memory: {why}")
            self.record("copy skipped", step=step, reason=why)
            return False
        tree = snapshot(state, self._cfg).saved
        about = self._about | {"skipped_batches": skipped.ranges, "rewinds": skipped.rewinds}
        about |= metadata_of(tree, tokens_seen) | {"callbacks": dict(callbacks)}
        about["position"] = position
        about |= {} if best is None else {"best": dataclasses.asdict(best)}
        group, self._number = Group(step, self.session, self._number), self._number + 1
        try:
            slot.copy(tree)
        except _OF_COPIES as error:
            done: Future[None] = Future()
            done.set_exception(error)
        else:
            held = time.perf_counter() - began
            done = self._threads.submit(self._complete, slot, group, about, held)
        self._last = _Copy(group, slot, done)
        return True

    def _complete(self, slot: Slot, group: Group, about: dict[str, Any], held: float) -> None:
        """On the thread: complete the files, and send what other hosts are to hold."""
        began = time.perf_counter()
        paths = slot.complete(group, about)
        written = time.perf_counter()
        sent = sum(map(self._send, paths))
        seconds = {"loop_waited": held, "write_seconds": written - began}
        seconds["send_seconds"] = time.perf_counter() - written
        size = self._plan.pieces.num_bytes
        self.record("copied", step=group.step, bytes=size, sent_bytes=sent, **seconds)
        text = f"copied step {group.step} to memory: {size / 1e9:.3f} GB, the loop waited "
        text += f"{held:.2f} s"
        if sent:
            text += f"; sent {sent / 1e9:.3f} GB in {seconds['send_seconds']:.2f} s"
        self._log(text)

    def _send(self, path: Path) -> int:
        """Send a file to the next hosts. Returns the bytes sent. A lost host is only reported."""
        file, sent = read_name(path.name), 0
        assert file is not None
        for to in [] if file.shared else self._plan.receivers:
            try:
                with self._plan.place.connected(to) as client:
                    client.write(path)
                sent += path.stat().st_size
            except HostLost as error:
                self._tell(file.group.step, f"it is not on another host: {error}")
        return sent

    def _tell(self, step: int, reason: str) -> None:
        warn(f"the copy of step {step} in memory: {reason}")
        self.record("copy failed", step=step, error=reason[:500])

    def _next_slot(self) -> tuple[Slot | None, str]:
        """Agree on what becomes of the last copy, and on where the next one is written.

        Returns:  the slot; None, and the reason, if there is none now.
        Communication: an all-gather of 6 bytes.
        """
        last = self._last
        error = last.done.exception() if last is not None and last.done.done() else None
        mine = [last is not None and not last.done.done(), error is not None]
        busy, failed, *slots_missing = _any_of(mine + [not slot.ready for slot in self._slots])
        if busy:
            return None, "the last one is still being written or sent"
        if last is not None:
            self._last = None
            if error is not None:
                self._tell(last.group.step, str(error) or type(error).__name__)
            if failed:
                self._drop(last)
            else:
                self._keep(last)
        number = 1 if self._good is not None and self._good.slot is self._slots[0] else 0
        slot = self._slots[number]
        if slots_missing[number]:
            failure = slot.failure
            slot.begin(self._threads)
            return None, f"no memory: {failure}" if failure else "its memory is being allocated"
        return slot, ""

    def _keep(self, copy: _Copy) -> None:
        """Note that a copy is complete in all processes, and delete all earlier ones."""
        if self._good is not None:
            self._forget_name(self._good.slot)
        self._good, self._restored = copy, None
        if not self._plan.first_here:
            return

        def keep(file: PieceFile | None) -> bool:
            if file is None:
                return True  # somebody is writing it
            mine = file.group.session == self.session
            return mine and file.group.number >= copy.group.number

        delete_files(self._folder, MIRRORED, keep)
        delete_files(self._folder, OWN, self._is_not_earlier)

    def _is_not_earlier(self, file: PieceFile | None) -> bool:
        """Whether a file is of this session, whose processes rename their files themselves."""
        return file is None or file.group.session == self.session

    def _drop(self, copy: _Copy) -> None:
        """Drop a copy that is not complete in all processes."""
        self._forget_name(copy.slot)
        if self._plan.first_here:
            keep = lambda file: file is None or file.group != copy.group  # noqa: E731
            delete_files(self._folder, MIRRORED, keep)

    def _forget_name(self, slot: Slot) -> None:
        try:
            slot.drop()
        except OSError as error:  # somebody has deleted its files
            slot.begin_again(self._threads)
            warn(f"files of a copy of the state in memory are gone: {error}")

    def forget(self) -> None:
        """Delete all copies: the run goes back to a step before them, and continues otherwise."""
        self.wait()
        peers.any_process(False)  # nothing is being sent
        for copy in filter(None, (self._good, self._last)):
            self._forget_name(copy.slot)
        self._good = self._last = self._restored = None
        if self._plan.first_here:
            delete_files(self._folder, MIRRORED, lambda file: file is None)
            delete_files(self._folder, OWN, self._is_not_earlier)
        peers.any_process(False)

    def wait(self) -> None:
        """Wait until the last copy is complete here and sent, or has failed."""
        if self._last is not None:
            self._last.done.exception()

    def close(self) -> None:
        """Wait for the last copy, and free the memory of this process. Complete files stay."""
        for slot in self._slots:
            self._threads.submit(slot.close)
        self._threads.shutdown()

    def __enter__(self) -> "MemoryCheckpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def limits_of(session: str, num_steps: int, received: int) -> Limits:
    """Return what a host takes from others, with some room for indices.

    Args:     received: bytes of the pieces of one copy that it receives.
    """
    most = received + received // 100 + _ROOM
    # The last copy, the one being written, and one before that is being deleted.
    return Limits(session=session, last_step=num_steps, file_bytes=most, all_bytes=3 * most)


def metadata_of(tree: Any, tokens_seen: int) -> dict[str, Any]:
    """Return the fields of `Saved` that depend on the state. Communication: as `fingerprints`."""
    step, sums = int(tree["step"]), fingerprints(tree)
    return {"step": step, "tokens_seen": int(tokens_seen), integrity.FINGERPRINTS: sums}


def _any_of(flags: list[bool]) -> list[bool]:
    """Return for each flag whether it is true in any process."""
    if jax.process_count() == 1:
        return flags
    every = multihost_utils.process_allgather(np.asarray(flags, np.int8))
    return [bool(x) for x in np.any(np.reshape(every, (-1, len(flags))), axis=0)]
