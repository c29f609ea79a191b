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
from jaxpar.stores.sessions import FILE, sessions_of

#: Seconds that processes wait for the one that downloads the run.
WAIT_SECONDS = 86_400.0


@contextlib.contextmanager
def stored(cfg: Config) -> Iterator[Mirror | None]:
    """Take the lease on the run's store, download what `run.dir` lacks, and upload what it gets.

    Process 0 does this for all; the others wait for it, before and after. At the end, what is
    waiting is uploaded. None without `run.store`, and in the other processes.

    Raises:   ConfigError for a store that cannot be used, before anything is written; RunLocked
              when another run holds the lease; StoreError; in the other processes, PeerFailed.
    """
    if not cfg.run.store:
        yield None
        return
    with contextlib.ExitStack() as stack:
        open_here = lambda: _opened(cfg, stack) if peers.rank() == 0 else None  # noqa: E731
        mirror = peers.all_or_none("object store", WAIT_SECONDS, open_here)
        _require_shared(cfg, mirror)
        yield mirror
        if mirror is not None:
            mirror.drain()
        peers.any_process(False)  # the others stay until all is uploaded


def _opened(cfg: Config, stack: contextlib.ExitStack) -> Mirror:
    address, folder = read_address(FIELD, cfg.run.store), Path(cfg.run.dir).absolute()
    objects = Objects(address, FIELD)
    lease = stack.enter_context(Lease(objects, log))
    fetch(objects, folder, FILES, log)
    log(f"store      {address}, uploaded from {folder}")
    keeping = Keeping(cfg.checkpoint.keep, cfg.checkpoint.keep_every, lambda: _best(folder))
    return stack.enter_context(Mirror(objects, lease, folder, keeping, FILES, log))


def _best(folder: Path) -> int:
    """Return the step of the best evaluation, as the last checkpoint knows it; 0 for none."""
    with contextlib.suppress(RunError, ConfigError):
        return int(checkpoint.read_saved(folder).best.get("step", 0))
    return 0


def _require_shared(cfg: Config, mirror: Mirror | None) -> None:
    """Check that all processes see the folder that process 0 uploads.

    Raises:   ConfigError, or PeerFailed in the other processes.
    """
    session = mirror.lease.session if mirror is not None else ""
    session = peers.exchange("session of the store", session, WAIT_SECONDS)[0]

    def check() -> None:
        if peers.rank() and session not in sessions_of(Path(cfg.run.dir)):
            rule = f"is not the folder that process 0 uploads: it has no {FILE} of this run"
            fix = "use a --run.dir that all hosts share, beside --run.store"
            raise ConfigError("run.dir", cfg.run.dir, rule, fix)

    peers.all_or_none("shared run.dir", WAIT_SECONDS, check)
