"""Traces some steps of a run that goes on: those of `profile.start`, and those asked for meanwhile.

A request is the file RUN/profile.request, which the first process takes away when it sees it, or
SIGUSR1 to any process. With several processes all must trace the same steps, and they agree
without waiting for one another. A process publishes a step that is `AHEAD` of its own and a
multiple of `train.log_every`, and all look there for such steps. Nobody can be past it: a process
fetches each step's loss when it has dispatched the next, so none is two steps ahead of another.

Failures here are logged, and the run continues. The compiled step is the same with and without.
"""

import contextlib
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxpar.config import Config
from jaxpar.model.flops import train_flops_per_token
from jaxpar.profiling import folder
from jaxpar.profiling.trace import read as trace
from jaxpar.runtime import provenance
from jaxpar.runtime.processes import peers

#: Whoever makes this file in the run folder asks for a profile.
REQUEST_FILE = "profile.request"

#: Seconds between two looks for it.
LOOK_SECONDS = 1.0

#: Steps between a request and the agreed step, at least.
AHEAD = 3

#: Profiles that one attempt takes: a request that is made over and over must not fill the disk.
MAX_PROFILES = 20

_TOPIC = "profile"

#: Signals that have come, until a profile takes them. A list: an Event's lock can be held already
#: when the handler runs.
_signals: list[int] = []


@contextlib.contextmanager
def profile_on_signal() -> Iterator[None]:
    """SIGUSR1 asks for a profile from here on; elsewhere it ends a process.

    Python delivers signals to the main thread alone, so in another one it listens to nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _signals.clear()
    earlier = signal.signal(signal.SIGUSR1, lambda number, _: _signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, earlier)


class RunProfiler:
    """Begins and ends traces between steps; the loop calls it at every step.

    Use as a context manager around the loop, in every process, within `profile_on_signal`.
    """

    def __init__(
        self, cfg: Config, run_dir: Path, program: Any, mesh: str, log: Callable[[str], None]
    ):
        """Args:     program: the compiled step. mesh: in words. log: called with what happens."""
        self._cfg, self._dir, self._program, self._mesh = cfg, run_dir, program, mesh
        self._log, self._several = log, peers.world_size() > 1
        self._looked = float("-inf")
        self._first, self._latest, self._taken = 0, 0, 0
        self._agreed_on = -2
        self._tracing = contextlib.ExitStack()
        self._mark: Any = None

    def __enter__(self) -> "RunProfiler":
        return self

    def __exit__(self, *_: object) -> None:
        if self._first:
            self._end()
        if self._agreed_on > 0:  # where the run goes back, it comes to that step again
            with contextlib.suppress(RuntimeError):  # the run may be ending for the same reason
                peers.publish(_TOPIC, "")

    def before(self, step: int, state: Any, pause: Callable[[], None], enter: Any) -> None:
        """A step is about to be taken: a trace that is complete ends, one that is due begins.

        Args:     step: counted from 1. state: what the last step made, which is waited for, so
                  that traces hold whole steps. pause: leaves the time that it takes out of the
                  step times; it may raise. enter: `Phases.enter`.
        """
        begins = self._is_due(step)
        ends = self._first and step == self._first + self._cfg.profile.num_steps
        if begins or ends:
            enter("profile", step, slow=True)
            pause()
            jax.block_until_ready(state)
        if ends:
            self._end()
        if begins and self._first:
            self._log(f"profile    asked for at step {step}, during another: left out")
        elif begins:
            self._begin(step)
        self._latest = step
        self._annotate(step)

    # -------------------------------------------------------------------------------- requests

    def _is_due(self, step: int) -> bool:
        if not self._several:
            return step == self._cfg.profile.start or (not self._first and self._is_asked_for())
        return self._all_agree(step - 1) or step == self._cfg.profile.start

    def _is_asked_for(self) -> bool:
        """Whether this process has got a request, which is then taken."""
        if _signals:
            _signals.clear()
            return True
        if peers.rank() != 0 or time.monotonic() - self._looked < LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        try:
            (self._dir / REQUEST_FILE).unlink()
        except OSError:
            return False  # none there, as a rule
        return True

    def _all_agree(self, done: int) -> bool:
        """Whether some process has asked for a trace that begins after `done` steps."""
        every = self._cfg.train.log_every
        # The last to come past the step that was agreed on may have been one behind this process.
        free = not self._first and done > self._agreed_on + 1
        try:
            if free and self._is_asked_for():
                self._agreed_on = -(-(done + AHEAD) // every) * every
                peers.publish(_TOPIC, str(self._agreed_on))
            return done % every == 0 and str(done) in peers.read_published(_TOPIC).values()
        except RuntimeError as error:  # JAX's service did not answer; it ends the run if it is gone
            self._log(f"WARNING    no profile: {error}")
            return False

    # ---------------------------------------------------------------------------------- traces

    def _scratch(self) -> Path:
        """Where this process's profiler writes: it names files by host, and several share one."""
        return folder.folder_of(self._dir, self._first) / f".process_{peers.rank()}"

    def _begin(self, step: int) -> None:
        if self._taken == MAX_PROFILES:
            self._log(f"WARNING    no profile: {MAX_PROFILES} in one attempt are enough")
            return
        self._first, self._taken = step, self._taken + 1
        last = step + self._cfg.profile.num_steps - 1
        try:
            shutil.rmtree(self._scratch(), ignore_errors=True)
            self._scratch().mkdir(parents=True)
            self._tracing.enter_context(trace.capture(self._scratch()))
            self._log(f"profile    of steps {step} to {last} begins")
        except Exception as error:  # a run never ends over its profile
            self._fail(error)

    def _annotate(self, step: int) -> None:
        """Mark the step in the trace, for tools that show it."""
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
        if self._first:
            self._mark = jax.profiler.StepTraceAnnotation("train", step_num=step)
            self._mark.__enter__()

    def _end(self) -> None:
        try:
            if self._mark is not None:
                self._mark.__exit__(None, None, None)
                self._mark = None
            self._tracing.close()
            self._keep()
        except Exception as error:  # as above
            self._fail(error)
        self._first = 0

    def _keep(self) -> None:
        """Put the trace where it belongs, with what is needed to read it."""
        first, last = self._first, self._latest
        where = folder.folder_of(self._dir, first)
        traces = folder.trace_folder(where)
        traces.mkdir(parents=True, exist_ok=True)
        for file in self._scratch().rglob("*.*"):
            for ending in (".xplane.pb", ".trace.json.gz"):
                if file.name.endswith(ending):
                    file.replace(traces / f"process_{peers.rank()}{ending}")
        shutil.rmtree(self._scratch())
        if peers.rank() == 0:
            folder.write_hlo(where, self._program.as_text())
            folder.write_facts(where, self._facts(first, last - first + 1))
            size = folder.num_bytes(where) / 1e6
            self._log(
                f"profile    of steps {first} to {last} in {where}, {size:,.1f} MB; to read it: "
                f"python -m jaxpar.profile {shlex.quote(str(self._dir))} --step {first}"
            )

    def _facts(self, first: int, count: int) -> folder.ProfileFacts:
        cfg = self._cfg
        tokens = cfg.train.global_batch_size * cfg.data.seq_len
        memory = self._program.memory_analysis()
        sizes = {n: getattr(memory, n) for n in dir(memory) if n.endswith("_in_bytes")}
        m, pairs = cfg.model, tokens * cfg.data.seq_len / 2
        attention = 14 * m.num_layers * m.num_heads * m.head_dim * pairs
        return folder.ProfileFacts(
            first_step=first,
            num_steps=count,
            processes=peers.world_size(),
            devices=jax.device_count(),
            device_kind=jax.devices()[0].device_kind,
            mesh=self._mesh,
            tokens=tokens,
            flops=tokens * train_flops_per_token(cfg.model, cfg.data.seq_len, lora=cfg.lora),
            attention_flops=attention if m.sliding_window is None else None,
            memory=sizes,
            versions=provenance.versions(),
        )

    def _fail(self, error: Exception) -> None:
        text = f"WARNING    profile of step {self._first} failed: {type(error).__name__}: {error}"
        # Said by whichever process it is: the first may have no trouble.
        print(f"{text} ({peers.process_name(peers.rank())})", flush=True)
        self._tracing.pop_all()
        shutil.rmtree(self._scratch(), ignore_errors=True)
        self._first = 0
