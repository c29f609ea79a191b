"""Options of `python -m jaxpar.profile`, and of its --bench."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.config import ConfigError
from jaxpar.config.command_line import ConfigArguments
from jaxpar.config.options import Argument, Range, Written
from jaxpar.config.rules.limits import STEP
from jaxpar.config.rules.run import MAX_PROFILED_STEPS

#: The argument that names a profile.
OPTION = "RUN_OR_TRACE"

#: Fewest steps before timing starts: the first ones load kernels, and clocks settle.
WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Show a profile, or compare two, or cards."""

    paths: Annotated[tuple[str, ...], Argument(OPTION)]
    """Run folder, folder of a profile, or file NAME.xplane.pb or NAME.xplane.pb.gz. Two are
    compared. Or cards of --bench, to compare side by side."""
    step: Annotated[int | None, STEP] = None
    """First step of the profile, if the run has several. None: the latest profile."""
    top: Annotated[int, Range(1, 100_000, 20)] = 20
    """Number of kernels and of groups of buffers to list."""
    gpu: str = ""
    """GPU whose peaks to use, as named by `python -m jaxpar.plan`. Empty: the GPU of the trace."""
    json: str = ""
    """File to which to write all figures as JSON."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Measure the training speed of a config.

    Runs the train step of a config on its data, from fresh weights, without checkpoints or
    evaluation, and then a few more steps under the profiler. Prints the figures, and writes them to
    a card: a JSON file that also has the conditions of the measurement. docs/profiling.md
    explains each figure. SIGTERM or Ctrl-C ends the steps: the card then has those so far, and says
    so.
    """

    config: ConfigArguments
    steps: Annotated[int, Range(1, 1_000_000, 20)] = 20
    """Number of timed steps."""
    warm_up: Annotated[int, Range(WARM_UP, 1_000_000, WARM_UP)] = WARM_UP
    """Number of steps before them, in which routers learn to balance their experts."""
    profile_steps: Annotated[int, Range(0, MAX_PROFILED_STEPS, 2)] = 2
    """Number of profiled steps afterwards. 0: none."""
    profiler: Literal["jax", "nvidia"] = "jax"
    """What measures the profiled steps. nvidia: ncu or nsys around this program."""
    routing: Annotated[str, Written("FILE")] = ""
    """Repeat a routing that a run has recorded."""
    trace: Annotated[str, Written("DIR")] = ""
    """Folder in which to keep the profiler's trace."""
    card: Annotated[str, Written("FILE")] = ""
    """JSON file to which to write the card."""
    commit: str = ""
    """Commit to record on the card, if there is no checkout."""

    def __post_init__(self) -> None:
        if self.trace and not self.profile_steps:
            rule, fix = "requires profiled steps, but there are none", "use --profile-steps 2"
            raise ConfigError("--trace", self.trace, rule, f"{fix}, or remove --trace")
