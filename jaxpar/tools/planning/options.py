"""Options of `python -m jaxpar.plan`, and of its --goodput and --hardware."""

from dataclasses import dataclass
from typing import Annotated

from jaxpar.config import ConfigError
from jaxpar.config.command_line import ConfigArguments
from jaxpar.config.options import Range, Written
from jaxpar.prediction.rates import EXPERT_IMBALANCE

#: Default number of layouts in the ranking.
DEFAULT_TOP = 10

#: Default number of GPUs.
DEFAULT_GPUS = 8

#: Largest number of GPUs: --quick takes 19 s for half of it.
MAX_GPUS = 1 << 17

#: Largest budget of tokens: far more text than exists.
MAX_TOKENS = 1e18

#: Options that --min-gpus would ignore: it prints no ranking.
OF_THE_RANKING = ("all", "fix", "write", "compile", "tokens", "top")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Rank the layouts of a config on a number of GPUs.

    The plan tries all values of the parallel fields that define a layout (see --fix), whatever the
    config sets. Other fields, such as parallel.context, apply to all layouts.
    """

    config: ConfigArguments
    gpus: Annotated[int | None, Range(1, MAX_GPUS, DEFAULT_GPUS)] = None
    """Total number of GPUs. None: 8."""
    gpu: Annotated[str, Written("NAME")] = "h200"
    """Kind of GPU, one of --hardware."""
    nodes: Annotated[int | None, Range(1, MAX_GPUS, 1)] = None
    """Number of hosts. None: as few as possible for this GPU."""
    network: Annotated[str, Written("NAME")] = "ib400"
    """Network between hosts, one of --hardware, or its speed per GPU as 10gbit."""
    top: Annotated[int | None, Range(1, 1_000_000, DEFAULT_TOP)] = None
    """Number of layouts to show. None: 10."""
    all: bool = False
    """Show all layouts instead of the best of each mesh."""
    fix: Annotated[str, Written("FIELD=VALUE,...")] = ""
    """Fix fields of the layout: pipeline, replica, data, expert, sequence, tensor, zero,
    num_microbatches, virtual_stages, row_groups, remat."""
    expert_imbalance: float = EXPERT_IMBALANCE
    """Load of the fullest rank of an expert axis, relative to the mean, in the mean layer:
    fullest_rank_mean of a run."""
    quick: bool = False
    """Try fewer layouts, such as only powers of two of microbatches."""
    write: Annotated[str, Written("FILE")] = ""
    """Write the best layout as a config file, FILE.py."""
    json: bool = False
    """Print JSON instead of tables."""
    compile: Annotated[int, Range(0, 1_000_000, 1)] = 0
    """Compile this many of the best layouts with XLA."""
    min_gpus: bool = False
    """Find the fewest GPUs that fit (implies --quick)."""
    tokens: float | None = None
    """Number of training tokens: prints the time and GPU-hours."""

    def __post_init__(self) -> None:
        if self.tokens is not None and not 1 <= self.tokens <= MAX_TOKENS:
            rule = f"must be at least 1, and at most {MAX_TOKENS:g}"
            raise ConfigError("--tokens", self.tokens, rule, "use --tokens 15e12")
        if not 1 <= self.expert_imbalance <= MAX_GPUS:
            rule = f"must be at least 1, which is balanced, and at most {MAX_GPUS:,}"
            fix = f"use --expert-imbalance {EXPERT_IMBALANCE}"
            raise ConfigError("--expert-imbalance", self.expert_imbalance, rule, fix)
        shown, asked = self.top or DEFAULT_TOP, self.compile
        if asked > shown:
            rule = f"must be at most {shown}, the number of layouts shown"
            raise ConfigError("--compile", asked, rule, f"use --compile {shown} or --top {asked}")
        if self.min_gpus:
            self._check_alone()

    def _check_alone(self) -> None:
        """Raise ConfigError for an option that --min-gpus would ignore."""
        why = {name: "prints no ranking" for name in OF_THE_RANKING}
        why |= {"gpus": "determines the number of GPUs", "nodes": "uses complete hosts"}
        for name, reason in why.items():
            if value := getattr(self, name):
                option = f"--{name}"
                rule = f"cannot be combined with --min-gpus, which {reason}"
                raise ConfigError(option, value, rule, f"remove {option} or --min-gpus")


#: The values that the options of --goodput may have.
MIN, MAX = 1e-3, 1e9


@dataclass(frozen=True, kw_only=True)
class GoodputOptions:
    """Print the best time between saves, and the share of the time that counts (Young, Daly)."""

    gpus: Annotated[int, Range(1, MAX_GPUS, DEFAULT_GPUS)] = DEFAULT_GPUS
    """Total number of GPUs."""
    failure_hours: float = 50_000.0
    """Mean hours between failures of a GPU. Default: Llama 3 405B without planned stops, 419 on
    16,384 H100s in 54 days (2407.21783, table 5)."""
    save_seconds: float = 1.0
    """Seconds that training waits for a save."""
    restart_seconds: float = 240.0
    """Seconds from a failure to the next step, without lost work."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        for name in ("failure_hours", "save_seconds", "restart_seconds"):
            value, option = getattr(self, name), "--" + name.replace("_", "-")
            if not MIN <= value <= MAX:
                fix = f"use {option} {getattr(type(self), name):g}"
                raise ConfigError(option, value, f"must be from {MIN:g} to {MAX:g}", fix)


@dataclass(frozen=True, kw_only=True)
class HardwareOptions:
    """Print the GPUs and networks, with sources."""

    json: bool = False
    """Print JSON instead of tables."""


type Options = PlanOptions | GoodputOptions | HardwareOptions
