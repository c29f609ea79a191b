"""Checks the options of `python -m jaxpar.plan` before it plans."""

from jaxpar.config import ConfigError
from jaxpar.planning.options import DEFAULT_TOP, EXPERT_IMBALANCE, MAX_GPUS, PlanOptions

#: Options that --min-gpus would ignore: it prints no ranking.
OF_THE_RANKING = ("all", "fix", "write", "compile", "tokens", "top")


def check_questions(options: PlanOptions) -> None:
    """Check that --min-gpus is not combined with an option that it would ignore.

    Raises:   ConfigError if it is.
    """
    if not options.min_gpus:
        return
    why = {name: "prints no ranking" for name in OF_THE_RANKING}
    why |= {"gpus": "determines the number of GPUs", "nodes": "uses complete hosts"}
    for name, reason in why.items():
        if value := getattr(options, name):
            option = f"--{name}"
            rule = f"cannot be combined with --min-gpus, which {reason}"
            raise ConfigError(option, value, rule, f"remove {option} or --min-gpus")


def check_imbalance(load: float) -> None:
    """Check the load of the fullest rank of an expert axis.

    Raises:   ConfigError if no axis can have it.
    """
    if not 1 <= load <= MAX_GPUS:
        rule = f"must be at least 1, which is balanced, and at most {MAX_GPUS:,}"
        fix = f"use --expert-imbalance {EXPERT_IMBALANCE}"
        raise ConfigError("--expert-imbalance", load, rule, fix)


def check_compiled(options: PlanOptions) -> None:
    """Check the number of layouts to compile.

    Raises:   ConfigError if it exceeds the number of layouts shown.
    """
    shown, asked = options.top or DEFAULT_TOP, options.compile
    if asked > shown:
        rule = f"must be at most {shown}, the number of layouts shown"
        raise ConfigError("--compile", asked, rule, f"use --compile {shown} or --top {asked}")
