"""A run in an object store (`run.store`): takes its lease, downloads it, and uploads its folder."""

import contextlib
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxpar.checkpoint.saved import checkpoint_folder, damage, read_saved, saved_steps
from jaxpar.checkpoint.shards import LAYOUT
from jaxpar.config import Config, ConfigError
from jaxpar.config.rules.paths import FIELD, absolute, read_address
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.processes.shared_folder import sharing
from jaxpar.stores import steps
from jaxpar.stores.fetching import bring, fetch, fetch_files
from jaxpar.stores.files import last_session, note
from jaxpar.stores.lease import Lease
from jaxpar.stores.mirror import Keeping, Mirror, NotStored, ShardMirror, upload_rest
from jaxpar.stores.objects import Objects
from jaxpar.stores.shards import ProcessShards, finish, folder_name

#: Seconds that processes wait for the one that downloads the run.
WAIT_SECONDS = 86_400.0

#: Seconds that a rewind waits for the upload of the newest checkpoint.
REWIND_SECONDS = 3600.0


class RunInStore:
    """A run whose store is open: downloaded, and not written before `begin`.

    If all processes share `run.dir`, process 0 does everything, and the others wait for it.
    Otherwise each folder gets a copy of the checkpoint that the run starts from, and each process
    saves and uploads its own shards.
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
        #: Uploads the shards of a process other than 0.
        self._shards: ShardMirror | None = None
        #: Where this process saves its shards; None if it saves to `run.dir` with the others.
        self.own: Path | None = None
        self._bringings = itertools.count()
        self._folder = absolute(cfg.run.dir)
        first = sharing("run.dir", self._folder, WAIT_SECONDS)
        self._num_folders = len(set(first))
        #: Whether this process does what is done once for each folder.
        self._leads = first[peers.rank()] == peers.rank()
        if self._num_folders > 1:
            self.own = self._folder / folder_name(peers.rank(), peers.world_size())
        self._is_new = True
        peers.all_or_none("object store", WAIT_SECONDS, self._open)
        if self.own is not None:
            self._open_others()

    def _open(self) -> None:
        self._address = read_address(FIELD, self._cfg.run.store)
        if peers.rank() != 0:
            return
        self._objects = Objects(self._address, FIELD)
        self._is_new = not last_session(self._objects)
        self.lease = self._stack.enter_context(Lease(self._objects, log))
        self.lease.leaves_nothing = self._is_new
        fetch(self._objects, self._folder, log, checkpoints=self.own is None)
        if not self._is_new:
            note(self._folder, self.lease.session, self._address)
            if self.own is not None:
                upload_rest(self._objects, self.lease, self._folder, log)

    def _open_others(self) -> None:
        """Bring the run's files and its newest checkpoint to the folders of all hosts."""
        self._is_new = peers.any_process(self._is_new and peers.rank() == 0)

        def files() -> None:
            if peers.rank() != 0:
                self._objects = Objects(self._address, FIELD)
            if self._leads and self._is_new:
                self._require_no_checkpoint()
            elif self._leads and peers.rank() != 0:
                fetch_files(self._objects, self._folder)

        peers.all_or_none("files of the store", WAIT_SECONDS, files)
        if not self._is_new:
            folder = self._folder if self._leads else None
            finish(self._objects, folder, self.lease, LAYOUT, WAIT_SECONDS)
        self._bring()

    def _require_no_checkpoint(self) -> None:
        """Raises:   ConfigError for a folder with checkpoints that no other host can download."""
        if saved_steps(self._folder):
            rule = f"has checkpoints, which are not in {self._address}, and not on every host"
            fix = "use a new --run.dir, or continue the run on this host alone, which uploads it"
            raise ConfigError("run.dir", str(self._folder), rule, fix)

    def _bring(self) -> int | None:
        name = f"checkpoint of the store {next(self._bringings)}"
        folder = self._folder if self._leads else None
        return bring(self._objects, folder, damage, log, name, WAIT_SECONDS)

    def begin(self) -> None:
        """Start to upload, once every process has checked the run.

        Raises:   StoreError; ConfigError; in the other processes, PeerFailed.
        """
        if self.own is not None and self._leads:  # of an earlier attempt, perhaps on another mesh
            shutil.rmtree(self.own.parent, ignore_errors=True)
        session = self.lease.session if self.lease is not None else ""
        session = peers.exchange("session of the store", session, WAIT_SECONDS)[0]
        peers.all_or_none("upload", WAIT_SECONDS, lambda: self._begin(session))

    def _begin(self, session: str) -> None:
        process = peers.rank(), peers.world_size()
        if self.own is not None and self._leads and self.lease is None:
            note(self._folder, session, self._address)
        shards = None
        if self.own is not None:
            shards = ProcessShards(self._objects, self.own, process, session, LAYOUT)
        if self.lease is None:
            if shards is not None:
                self._shards = ShardMirror(self._objects, shards, log)
                self._stack.enter_context(self._shards)
            return
        c, text = self._cfg.checkpoint, f"store      {self._address}, uploaded from {self._folder}"
        if shards is not None:
            each = f"{self._num_folders} hosts have a folder each"
            text += f". {each}: every process uploads its own shards"
        log(text)
        keeping = Keeping(c.keep, c.keep_every, lambda: _best(self.own or self._folder))
        self.lease.leaves_nothing = False
        mirror = Mirror(self._objects, self.lease, self._folder, keeping, log, shards)
        self.mirror = self._stack.enter_context(mirror)

    def bring_newest(self) -> None:
        """Bring the newest checkpoint to `run.dir` on each host, before a rewind.

        All processes call this together, once what they have saved is on their disks. It does
        nothing if they share `run.dir`.

        Raises:   as `bring`.
        """
        if self.own is None:
            return
        uploader = self.mirror or self._shards
        assert uploader is not None
        uploader.wait(REWIND_SECONDS)
        peers.any_process(False)
        step = self._bring() or 0
        for place in sorted(checkpoint_folder(self.own).glob("*")):
            if (steps.step_of(place.name) or 0) > step:  # it is saved again
                shutil.rmtree(place)

    def drain(self) -> None:
        """Upload what is waiting, in all processes.

        Raises:   NotStored in all processes, if one could not.
        """
        uploaders = [one for one in (self.mirror, self._shards) if one is not None]
        late = [one for one in uploaders if not one.drain()]
        # The others stay until all is uploaded.
        if peers.any_process(bool(late)):
            what = f"not all of the run is in {self._cfg.run.store}"
            fix = "fix the cause above, and give the same command on the same hosts"
            raise NotStored(f"{what}. Fix: {fix}, which upload it")


@contextlib.contextmanager
def stored(cfg: Config) -> Iterator[RunInStore]:
    """Open the store of a run. At the end, what is waiting is uploaded, and the lease released.

    A run that is refused before `begin` leaves nothing in the store.

    Raises:   as `RunInStore`; NotStored at the end.
    """
    with contextlib.ExitStack() as stack:
        store = RunInStore(cfg, stack)
        yield store
        store.drain()


def _best(folder: Path) -> int:
    """Return the step of the best evaluation, as the last checkpoint knows it; 0 for none."""
    with contextlib.suppress(RunError, ConfigError):
        return int(read_saved(folder).best.get("step", 0))
    return 0
