"""The thread that uploads the shards of a process other than 0, while the run trains."""

from collections.abc import Callable

from jaxpar.stores import steps
from jaxpar.stores.objects import Objects
from jaxpar.stores.shards import ProcessShards
from jaxpar.stores.uploading import Uploader


class ShardMirror(Uploader):
    """Uploads the shards that this process saves. A context manager.

    It holds no lease: what it uploads is in no checkpoint before process 0, which does, says so.
    """

    def __init__(
        self, objects: Objects, shards: ProcessShards, mark: str, log: Callable[[str], None]
    ):
        """Start the thread. Args:     mark: the file that a step has once it is saved."""
        super().__init__(objects, shards.folder, log, "shards")
        self._shards, self._mark = shards, mark
        self._sent: dict[int, tuple[int, int]] = {}
        self.start()

    def look(self, ending: bool) -> bool:
        """As `Uploader.look`."""
        for step, about in sorted(self._unsent().items(), reverse=True):
            try:
                self._shards.send(step)
            except FileNotFoundError:  # the run has deleted it meanwhile
                continue
            self._sent[step] = about
        return not self._unsent()

    def late_steps(self) -> list[int]:
        """As `Uploader.late_steps`."""
        return sorted(self._unsent())

    def waiting(self) -> str:
        """As `Uploader.waiting`."""
        late = self.late_steps()
        return f"shards of steps {', '.join(map(str, late))}" if late else ""

    def _unsent(self) -> dict[int, tuple[int, int]]:
        found = steps.finished_steps(self._shards.folder, self._mark)
        return {step: about for step, about in found.items() if self._sent.get(step) != about}
