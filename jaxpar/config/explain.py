"""Report all broken rules of a config at once, with fixes that were tried.

A fix is printed only if the config passes with it and with the first fixes of the other rules.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxpar.config import Config, ConfigError
from jaxpar.config.errors import ConfigErrors, joined

#: Returns errors, or raises the first.
type Rule = Callable[[Config], Iterable[ConfigError] | None]

#: Applies all rules: a config, and the devices -> the resolved config.
type Resolve = Callable[[Config, int], Config]

#: Most rounds of fixes that are followed. Rules are checked in stages, so that a fix may lead to
#: rules that could not be checked before.
MOST = 16


def collected(rules: Iterable[Rule], cfg: Config) -> None:
    """Apply rules that do not depend on one another.

    Raises:   ConfigError with the errors of all.
    """
    found: list[ConfigError] = []
    for rule in rules:
        try:
            found += rule(cfg) or ()
        except ConfigError as error:
            known = {(one.field, one.rule) for one in found}  # several rules may read one list
            found += (one for one in errors_of(error) if (one.field, one.rule) not in known)
        except (ArithmeticError, LookupError, ValueError):
            if not found:  # a rule may rely on those before it
                raise
    if found:
        raise joined(found)


def errors_of(error: ConfigError) -> tuple[ConfigError, ...]:
    """Return the errors that an error consists of."""
    return error.errors if isinstance(error, ConfigErrors) else (error,)


def explained(resolve: Resolve, cfg: Config, devices: int) -> Config:
    """Return the resolved config.

    Raises:   ConfigError for all broken rules, with fixes that were tried.
    """
    try:
        return resolve(cfg, devices)
    except ConfigError as error:
        first = error
    tried = _Tried(resolve, devices)
    reports = list(_followed(tried, cfg, errors_of(first)))
    shown = [_with_fixes(tried, report, reports) for report in reports]
    raise joined(shown)


class _Report:
    """A broken rule, of the config with the fixes of the rules before it."""

    def __init__(self, cfg: Config, error: ConfigError, fix: str):
        self.cfg, self.error, self.fix = cfg, error, fix

    def is_in(self, errors: Iterable[ConfigError]) -> bool:
        """Return whether errors have that of this rule."""
        return any(same_rule(self.error, one) for one in errors)


class _Tried:
    """Configs with fixes applied, and the rules that they break."""

    def __init__(self, resolve: Resolve, devices: int):
        self.resolve, self.devices = resolve, devices

    def broken(self, cfg: Config) -> tuple[ConfigError, ...]:
        """Return the errors of a config."""
        try:
            self.resolve(cfg, self.devices and (cfg.run.cpu_devices or self.devices))
        except ConfigError as error:
            return errors_of(error)
        return ()

    def applied(self, cfg: Config, fix: str) -> Config | None:
        """Return the config with the options of a fix; None if they are not valid options."""
        from jaxpar.config.command_line import parse_overrides

        try:
            return parse_overrides(cfg, options_in(fix))
        except ConfigError:
            return None


def _followed(tried: _Tried, cfg: Config, errors: tuple[ConfigError, ...]) -> Iterator[_Report]:
    """Yield the broken rules, then those that show once these are fixed."""
    known: list[ConfigError] = []
    for _ in range(MOST):
        now = cfg
        errors = tuple(e for e in errors if not any(same_rule(e, other) for other in known))
        known += errors
        for error in errors:
            report = _Report(cfg, error, _best(tried, cfg, error))
            if report.is_in(tried.broken(now)):
                now = tried.applied(now, report.fix) or now
            yield report
        errors = () if now == cfg else tried.broken(now)
        if not errors:
            return
        cfg = now


def _best(tried: _Tried, cfg: Config, error: ConfigError) -> str:
    """Return the fix of a rule after which the fewest others are broken; "" without any."""
    before, left = tried.broken(cfg), dict[str, int]()
    for fix in fixes_of(error):
        changed = tried.applied(cfg, fix)
        if changed is None:
            continue
        after = tried.broken(changed)
        if not any(same_rule(error, one) for one in after):
            new = [one for one in after if not any(same_rule(one, other) for other in before)]
            left[fix] = len(new)
    return min(left, key=left.__getitem__, default="")


def _with_fixes(tried: _Tried, report: _Report, reports: Sequence[_Report]) -> ConfigError:
    """Return the error with those of its fixes that lead to a legal config."""
    error = report.error
    offered = fixes_of(error)
    if not offered:  # in words
        return error
    good = [fix for fix in offered if _is_good(tried, report, fix, reports)]
    good.sort(key=lambda fix: fix != report.fix)
    section = error.field.partition(".")[0]
    fix = "use " + ", or ".join(good) if good else f"change the section {section}"
    return ConfigError(error.field, error.value, error.rule, fix)


def _is_good(tried: _Tried, report: _Report, fix: str, reports: Sequence[_Report]) -> bool:
    """Return whether a config with a fix, and the first ones of other rules, is legal."""
    cfg = tried.applied(report.cfg, fix)
    if cfg is None or report.is_in(tried.broken(cfg)):
        return False
    for other in reports:
        if other is not report and other.is_in(tried.broken(cfg)):
            cfg = tried.applied(cfg, other.fix) or cfg
    return not tried.broken(cfg)


def same_rule(one: ConfigError, other: ConfigError) -> bool:
    """Return whether two errors are of one rule, perhaps with other numbers, or a product of other
    sizes of the mesh."""
    return one.field == other.field and _words(one.rule) == _words(other.rule)


def _words(rule: str) -> str:
    return re.sub(r"parallel\.\w+( \* parallel\.\w+)* = 0", "0", re.sub(r"\d+", "0", rule))


def fixes_of(error: ConfigError) -> list[str]:
    """Return the alternatives of a fix that are options."""
    text = re.sub("^use (for example, )?", "", error.fix.replace("use, for", "use for"))
    ways = text.split(", or ")
    return [way for way in ways if way.startswith("--") and options_in(way)]


def options_in(fix: str) -> list[str]:
    """Return the options of a fix, with their values, without words after them."""
    words = shlex.split(fix)
    found: list[str] = []
    for name, value in zip(words[::2], words[1::2], strict=False):
        if not name.startswith("--"):
            break
        found += [name, value]
    return found
