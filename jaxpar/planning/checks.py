"""Checks the options of `python -m jaxpar.plan` before it plans."""

from jaxpar.config import ConfigError
from jaxpar.planning.options import DEFAULT_TOP, EXPERT_IMBALANCE, MAX_GPUS, PlanOptions

#: Options that replace the ranking, and options that apply only to the ranking.
QUESTIONS = ("min_gpus", "largest", "kv_cache")


OF_THE_RANKING = ("all", "fix", "write", "compile", "lower", "tokens", "top")


def check_questions(options: PlanOptions) -> None:
    """Check that the options can be combined.

    Raises:   ConfigError for two questions at once, or an option that a question would ignore.
    """
    asked = [name for name in QUESTIONS if getattr(options, name)]
    others = asked[1:] + [name for name in OF_THE_RANKING if getattr(options, name)]
    if asked and others:
        first, other = ("--" + name.replace("_", "-") for name in (asked[0], others[0]))
        rule = f"cannot be combined with {first}, which prints no ranking"
        fix = f"remove {other} or {first}"
        raise ConfigError(other, getattr(options, others[0]), rule, fix)
    for question, name, why in (
        ("min_gpus", "gpus", "determines the number of GPUs"),
        ("min_gpus", "nodes", "uses complete hosts"),
    ):
        value, option = getattr(options, name), f"--{name}"
        if getattr(options, question) and value is not None:
            first = "--" + question.replace("_", "-")
            rule = f"cannot be combined with {first}, which {why}"
            raise ConfigError(option, value, rule, f"remove {option} or {first}")


def check_imbalance(load: float) -> None:
    """Check the load of the fullest rank of an expert axis.

    Raises:   ConfigError if no axis can have it.
    """
    if not 1 <= load <= MAX_GPUS:
        rule = f"must be at least 1, which is balanced, and at most {MAX_GPUS:,}"
        fix = f"use --expert-imbalance {EXPERT_IMBALANCE}"
        raise ConfigError("--expert-imbalance", load, rule, fix)


def check_compiled(options: PlanOptions) -> None:
    """Check the numbers of layouts to compile and to lower.

    Raises:   ConfigError if one exceeds the number of layouts shown.
    """
    shown = options.top or DEFAULT_TOP
    for option, asked in (("--compile", options.compile), ("--lower", options.lower)):
        if asked > shown:
            rule = f"must be at most {shown}, the number of layouts shown"
            raise ConfigError(option, asked, rule, f"use {option} {shown} or --top {asked}")
