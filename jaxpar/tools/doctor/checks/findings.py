"""The result of a check: pass, warn, fail or skip, with a message and a remedy."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

type Status = Literal["pass", "warn", "fail", "skip"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the checklist.

    check    name of the check, as in docs/troubleshooting.md.
    said     what was found, with the values.
    remedy   what to do about it; empty if the check passed.
    where    the processes it applies to, such as "process 3 (gpu07)"; empty means all.
    """

    check: str
    status: Status
    said: str
    remedy: str = ""
    where: str = ""


def passed(check: str, said: str) -> Finding:
    """Return a finding that a check passed."""
    return Finding(check, "pass", said)


def warned(check: str, said: str, remedy: str) -> Finding:
    """Return a warning: training works, but slower or less safely than it could."""
    return Finding(check, "warn", said, remedy)


def failed(check: str, said: str, remedy: str) -> Finding:
    """Return a failure: training does not work, is far too slow, or gives wrong results."""
    return Finding(check, "fail", said, remedy)


def skipped(check: str, why: str) -> Finding:
    """Return a finding that a check does not apply."""
    return Finding(check, "skip", why)


def verdict(found: Iterable[Finding]) -> Status:
    """Return the worst status; "pass" if nothing failed or warned."""
    there = {finding.status for finding in found}
    return next((status for status in ("fail", "warn") if status in there), "pass")


def merge_findings(by_process: Sequence[Sequence[Finding]], names: Sequence[str]) -> list[Finding]:
    """Merge the findings of all processes. Equal findings appear once.

    Args:     by_process: the findings of each process. names: the processes' names, in order.
    """
    where: dict[Finding, list[str]] = {}
    for found, name in zip(by_process, names, strict=True):
        for finding in found:
            where.setdefault(finding, []).append(name)
    return [
        finding
        if len(there) == len(names)
        else dataclasses.replace(finding, where=", ".join(there))
        for finding, there in where.items()
    ]
