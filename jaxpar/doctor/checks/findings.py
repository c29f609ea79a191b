"""What a check found: passed, warned, failed or left out, in words, with the remedy."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

type Status = Literal["pass", "warn", "fail", "skip"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the checklist.

    check    what was looked at, as docs/doctor.md lists it.
    said     what was found, with the values.
    remedy   what to do about it; empty where it passed.
    where    the processes that it holds for, as "process 3 (gpu07)"; empty: all of them.
    """

    check: str
    status: Status
    said: str
    remedy: str = ""
    where: str = ""


def passed(check: str, said: str) -> Finding:
    """All is well."""
    return Finding(check, "pass", said)


def warned(check: str, said: str, remedy: str) -> Finding:
    """It works, but slower or less safely than it could."""
    return Finding(check, "warn", said, remedy)


def failed(check: str, said: str, remedy: str) -> Finding:
    """It gives wrong results, or far too slow ones, or cannot work."""
    return Finding(check, "fail", said, remedy)


def skipped(check: str, why: str) -> Finding:
    """It was not looked at."""
    return Finding(check, "skip", why)


def verdict(found: Iterable[Finding]) -> Status:
    """The worst status; "pass" where there is nothing worse."""
    there = {finding.status for finding in found}
    return next((status for status in ("fail", "warn") if status in there), "pass")


def merge_findings(by_process: Sequence[Sequence[Finding]], names: Sequence[str]) -> list[Finding]:
    """The findings of all processes, those that read the same in all of them once.

    Args:     by_process: of each process. names: of the processes, in the same order.
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
