"""A run in an object store (`run.store`): takes its lease, downloads it, and uploads its folder."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jaxpar import checkpoint
from jaxpar.checkpoint.integrity import FILES
from jaxpar.config import Config, ConfigError
from jaxpar.config.rules.paths import FIELD, read_address
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.stores.fetching import fetch
from jaxpar.stores.lease import Lease
from jaxpar.stores.mirror import Keeping, Mirror
from jaxpar.stores.objects import Objects
from jaxpar.stores.sessions import FILE, last_session, note, sessions_of

#: Seconds that processes wait for the one that downloads the run.
WAIT_SECONDS = 86_400.0


class RunInStore:
    """A run whose store is open: downloaded, and not written before `begin`.

    Process 0 does everything, and the others wait for it. Without `run.store`, nothing is done.
    """

    def __init__(self, cfg: Config, stack: contextlib.ExitStack):
        """Take the lease, and download what `run.dir` lacks. Args:     stack: ends what it begins.

        Raises:   ConfigError for a store that cannot be used; RunLocked when another run holds the
                  lease; StoreError; in the other processes, PeerFailed.
        """
        self._cfg, self._stack = cfg, stack
        self.lease: Lease | None = None
        #: Uploads the folder; None before `begin`, and in the other processes.
        self.mirror: Mirror | None = None
        self._is_new = True
        if cfg.run.store:
            peers.all_or_none("object store", WAIT_SECONDS, self._open)
            self._is_new = peers.any_process(self._is_new and peers.rank() == 0)
            if not self._is_new:
                self._require_shared()

    def _open(self) -> None:
        if peers.rank() != 0:
            return
        cfg, folder = self._cfg, Path(self._cfg.run.dir).absolute()
        self._address = read_address(FIELD, cfg.run.store)
        self._objects = Objects(self._address, FIELD)
        self._is_new = not last_session(self._objects)
        self.lease = self._stack.enter_context(Lease(self._objects, log))
        self.lease.leaves_nothing = self._is_new
        fetch(self._objects, folder, FILES, log)
        if not self._is_new:
            note(folder, self.lease.session, self._address)

    def begin(self) -> None:
        """Start to upload, once every process has checked the run.

        Raises:   StoreError; ConfigError if the processes do not share `run.dir`; in the other
                  processes, PeerFailed.
        """
        if not self._cfg.run.store:
            return
        peers.all_or_none("upload", WAIT_SECONDS, self._begin)
        if self._is_new:
            self._require_shared()

    def _begin(self) -> None:
        if self.lease is None:
            return
        c, folder = self._cfg.checkpoint, Path(self._cfg.run.dir).absolute()
        log(f"store      {self._address}, uploaded from {folder}")
        keeping = Keeping(c.keep, c.keep_every, lambda: _best(folder))
        self.lease.leaves_nothing = False
        mirror = Mirror(self._objects, self.lease, folder, keeping, FILES, log)
        self.mirror = self._stack.enter_context(mirror)

    def _require_shared(self) -> None:
        """Check that all processes see the folder that process 0 uploads.

        Raises:   ConfigError, or PeerFailed in the other processes.
        """
        cfg, session = self._cfg, self.lease.session if self.lease is not None else ""
        session = peers.exchange("session of the store", session, WAIT_SECONDS)[0]

        def check() -> None:
            if peers.rank() and session not in sessions_of(Path(cfg.run.dir)):
                rule = f"is not the folder that process 0 uploads: it has no {FILE} of this run"
                fix = "use a --run.dir that all hosts share, beside --run.store"
                raise ConfigError("run.dir", cfg.run.dir, rule, fix)

        peers.all_or_none("shared run.dir", WAIT_SECONDS, check)


@contextlib.contextmanager
def stored(cfg: Config) -> Iterator[RunInStore]:
    """Open the store of a run. At the end, what is waiting is uploaded, and the lease released.

    A run that is refused before `begin` leaves nothing in the store.

    Raises:   as `RunInStore`.
    """
    with contextlib.ExitStack() as stack:
        store = RunInStore(cfg, stack)
        yield store
        if store.mirror is not None:
            store.mirror.drain()
        if cfg.run.store:
            peers.any_process(False)  # the others stay until all is uploaded


def _best(folder: Path) -> int:
    """Return the step of the best evaluation, as the last checkpoint knows it; 0 for none."""
    with contextlib.suppress(RunError, ConfigError):
        return int(checkpoint.read_saved(folder).best.get("step", 0))
    return 0
