"""Traces steps during a run: those of `profile.start`, and those requested while it runs.

A profile of many steps is a sequence of traces of at most `MAX_PROFILED_STEPS` steps, each in its
own folder: the profiler keeps the events of a trace in memory until it ends.

A request is the file RUN/profile.request, which process 0 removes when it sees it, or SIGUSR1 to
any process. All processes must trace the same steps, and agree on them without waiting. The process
with the request publishes a step that is `AHEAD` of its own and a multiple of `train.log_every`.
At such steps, all processes look for published ones. None can be past it: a process fetches each
step's loss after dispatching the next step, so it is at most one step ahead of another.

Failures are logged, and the run continues. Profiling does not change the compiled step.
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
from jaxpar.config.rules.run import MAX_PROFILED_STEPS, MAX_PROFILES
from jaxpar.model.flops import attention_kernel_flops, train_flops_per_token
from jaxpar.monitoring import profile_folder
from jaxpar.monitoring.profile_folder import ProfileFacts
from jaxpar.runtime import provenance
from jaxpar.runtime.files import atomic
from jaxpar.runtime.processes import peers


@contextlib.contextmanager
def capture(folder: str | Path) -> Iterator[None]:
    """Trace the code in this context to a folder, without Python calls."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tens of thousands of events, which slow the host
    with jax.profiler.trace(folder, profiler_options=options):
        yield


def facts_of(cfg: Config, program: Any, mesh: str, first: int, num_steps: int) -> ProfileFacts:
    """Return the facts of a profile that begins with step `first`.

    Args:     program: the compiled step. mesh: a description.
    """
    tokens = cfg.train.global_batch_size * cfg.data.seq_len
    memory = program.memory_analysis()
    attention = attention_kernel_flops(cfg.model, cfg.data.seq_len)
    return ProfileFacts(
        first_step=first,
        num_steps=num_steps,
        processes=peers.world_size(),
        devices=jax.device_count(),
        device_kind=jax.devices()[0].device_kind,
        mesh=mesh,
        tokens=tokens,
        flops=tokens * train_flops_per_token(cfg.model, cfg.data.seq_len, lora=cfg.lora),
        attention_flops=None if attention is None else tokens * attention,
        memory={n: getattr(memory, n) for n in dir(memory) if n.endswith("_in_bytes")},
        versions=provenance.versions(),
    )


#: Creating this file in the run folder requests a profile.
REQUEST_FILE = "profile.request"

#: Seconds between checks for the file.
LOOK_SECONDS = 1.0

#: Fewest steps between a request and the agreed step.
AHEAD = 3

_TOPIC = "profile"

#: Signals received but not yet handled. A list, since an Event's lock may already be held when the
#: handler runs.
_signals: list[int] = []


@contextlib.contextmanager
def profile_on_signal() -> Iterator[None]:
    """Let SIGUSR1 request a profile within this context. Outside, it ends the process.

    Python delivers signals only to the main thread. In other threads this does nothing.
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
    """Starts and ends traces between steps. The train loop calls it at every step.

    Use it as a context manager around the loop in every process, within `profile_on_signal`.
    """

    def __init__(
        self, cfg: Config, run_dir: Path, steps: Any, mesh: str, log: Callable[[str], None]
    ):
        """Args:     steps: with `cfg` and `program`, the config and the compiled program of the
        latest step. mesh: a description. log: called with messages.
        """
        self._cfg, self._dir, self._steps, self._mesh = cfg, run_dir, steps, mesh
        self._log, self._several = log, peers.world_size() > 1
        self._looked = float("-inf")
        self._first, self._latest, self._taken = 0, 0, 0
        self._asked_for = range(0)  # the steps of the profile in progress, or of the last one
        self._agreed_on = -2
        self._tracing = contextlib.ExitStack()
        self._mark: Any = None

    def __enter__(self) -> "RunProfiler":
        return self

    def __exit__(self, *_: object) -> None:
        if self._first:
            self._end()
        if self._agreed_on > 0:  # after a rewind, the run reaches that step again
            with contextlib.suppress(
                RuntimeError
            ):  # the run may be ending because the service is gone
                peers.publish(_TOPIC, "")

    def before(self, step: int, state: Any, pause: Callable[[], None], enter: Any) -> None:
        """Called before each step: ends a complete trace, and starts one that is due.

        Args:     step: counted from 1. state: result of the last step. A trace waits for it, so
                  that it has complete steps. pause: excludes the time from the step times; it may
                  raise. enter: `Phases.enter`.
        """
        if self._is_due(step):
            if step in self._asked_for:
                why = "another profile is in progress"
                self._log(f"profile    request at step {step} ignored: {why}")
            else:
                self._asked_for = range(step, step + self._cfg.profile.num_steps)
        ends = self._first and step == self._last + 1
        begins = step in self._asked_for[::MAX_PROFILED_STEPS] and (ends or not self._first)
        if begins or ends:
            enter("profile", step, slow=True)
            pause()
            jax.block_until_ready(state)
        if ends:
            self._end()
        if begins:
            self._begin(step)
        self._latest = step
        self._annotate(step)

    @property
    def _last(self) -> int:
        """The last step of the trace in progress."""
        return min(self._first + MAX_PROFILED_STEPS, self._asked_for.stop) - 1

    # -------------------------------------------------------------------------------- requests

    def _is_due(self, step: int) -> bool:
        if not self._several:
            return self._is_scheduled(step) or (not self._first and self._is_asked_for())
        return self._all_agree(step - 1) or self._is_scheduled(step)

    def _is_scheduled(self, step: int) -> bool:
        start, every = self._cfg.profile.start, self._cfg.profile.every
        return step == start or (every > 0 and step > start and (step - start) % every == 0)

    def _is_asked_for(self) -> bool:
        """Return whether this process has a request, and clear it."""
        if _signals:
            _signals.clear()
            return True
        if peers.rank() != 0 or time.monotonic() - self._looked < LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        try:
            (self._dir / REQUEST_FILE).unlink()
        except OSError:
            return False  # usually there is none
        return True

    def _all_agree(self, done: int) -> bool:
        """Return whether a process requested a trace that begins after `done` steps."""
        every = self._cfg.train.log_every
        # Another process may be one step behind, and not have passed the agreed step yet.
        free = not self._first and done > self._agreed_on + 1
        try:
            if free and self._is_asked_for():
                self._agreed_on = -(-(done + AHEAD) // every) * every
                peers.publish(_TOPIC, str(self._agreed_on))
            return done % every == 0 and str(done) in peers.read_published(_TOPIC).values()
        except (
            RuntimeError
        ) as error:  # JAX's service did not respond; if it is gone, it ends the run
            self._log(f"WARNING    no profile: {error}")
            return False

    # ---------------------------------------------------------------------------------- traces

    def _scratch(self) -> Path:
        """This process's scratch folder: the profiler names files by host, which may be shared."""
        return profile_folder.folder_of(self._dir, self._first) / f".process_{peers.rank()}"

    def _begin(self, step: int) -> None:
        self._taken += 1
        if self._taken > MAX_PROFILES:
            why = f"this attempt has taken its maximum of {MAX_PROFILES}"
            if self._taken == MAX_PROFILES + 1:  # said once, not at every repeat
                self._log(f"WARNING    no profile of step {step}, or later ones: {why}")
            return
        self._first = step
        try:
            shutil.rmtree(self._scratch(), ignore_errors=True)
            self._scratch().mkdir(parents=True)
            self._tracing.enter_context(capture(self._scratch()))
            self._log(f"profile    tracing steps {step} to {self._last}")
        except Exception as error:  # a profile never ends a run
            self._fail(error)

    def _annotate(self, step: int) -> None:
        """Mark the step in the trace, for tools that display it."""
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
        """Move the trace to its folder, along with the HLO and facts needed to read it."""
        first, last = self._first, self._latest
        where = profile_folder.folder_of(self._dir, first)
        traces = profile_folder.trace_folder(where)
        traces.mkdir(parents=True, exist_ok=True)
        for file in sorted(self._scratch().rglob("*.*")):
            for ending in (".xplane.pb", ".trace.json.gz"):
                if file.name.endswith(ending):
                    atomic.move(file, traces / f"process_{peers.rank()}{ending}")
        shutil.rmtree(self._scratch())
        if peers.rank() == 0:
            cfg, program = self._steps.cfg, self._steps.program
            profile_folder.write_hlo(where, program.as_text())
            facts = facts_of(cfg, program, self._mesh, first, last - first + 1)
            profile_folder.write_facts(where, facts)
            size = profile_folder.num_bytes(where) / 1e6
            self._log(
                f"profile    steps {first} to {last} in {where}, {size:,.1f} MB; to read it: "
                f"python -m jaxpar.profile {shlex.quote(str(self._dir))} --step {first}"
            )

    def _fail(self, error: Exception) -> None:
        text = f"WARNING    profile of step {self._first} failed: {type(error).__name__}: {error}"
        # Printed by the process that failed, since process 0 may not.
        print(f"{text} ({peers.process_name(peers.rank())})", flush=True)
        self._tracing.pop_all()
        shutil.rmtree(self._scratch(), ignore_errors=True)
        self._first = 0
