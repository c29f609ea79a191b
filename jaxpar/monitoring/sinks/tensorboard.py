"""Metrics for TensorBoard: event files, written without TensorFlow."""

import math
import time
from collections.abc import Mapping
from pathlib import Path

from jaxpar.monitoring.metric_names import tag

#: Seconds between two flushes, which wait for the disk (fsync). A killed process loses the events
#: after the last flush; metrics.jsonl has them.
FLUSH_EVERY = 30.0


class TensorBoard:
    """Writes an event file for each start of a run; TensorBoard reads them as one run."""

    def __init__(self, folder: Path, first_step: int):
        """Start a file. TensorBoard drops what earlier files hold beyond `first_step`."""
        # The queue of tensorboardX hangs after its thread has met a full disk. The writer beneath
        # it writes synchronously, and raises.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._event = Event
        folder.mkdir(parents=True, exist_ok=True)
        # Files of the same second, as after a quick rewind, differ only in this suffix, and are
        # read in its order.
        suffix = f".{len(list(folder.glob('events.*'))):06d}"
        self._writer = EventsWriter(str(folder / "events"), suffix)
        self._flushed = -math.inf
        started = SessionLog(status=SessionLog.START)
        self._add(first_step + 1, session_log=started)

    def _add(self, step: int, **what) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, **what))
        if time.monotonic() - self._flushed > FLUSH_EVERY:
            self._writer.flush()
            self._flushed = time.monotonic()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all values."""
        values = [{"tag": tag(name), "simple_value": v} for name, v in metrics.items()]
        self._add(step, summary={"value": values})

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
