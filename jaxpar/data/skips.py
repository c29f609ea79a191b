"""Batches that a run skips after a rewind, and the batch that each step then uses."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.config.json_reader import read_json_object
from jaxpar.config.rules.numbers import MAX_INT

#: File in the run folder, once batches are skipped. Checkpoints contain it, too.
SKIPPED_FILE = "skipped_batches.json"


@dataclass(frozen=True)
class SkippedBatches:
    """Ranges of batches, as (first, count): ascending, disjoint, none empty."""

    ranges: tuple[tuple[int, int], ...] = ()
    rewinds: int = 0
    """Number of rewinds; it may exceed the number of ranges, since adjacent ones are merged."""

    def __str__(self) -> str:
        texts = [
            f"{first} to {first + count - 1}" if count > 1 else f"{first}"
            for first, count in self.ranges
        ]
        return f"batches {', '.join(texts)}" if texts else "no batches"

    def batch_of(self, step: int) -> int:
        """Return the batch of a step: its number plus all batches skipped before it."""
        batch = step
        for first, count in self.ranges:
            if batch < first:
                break
            batch += count
        return batch

    def and_also(
        self, ranges: Iterable[Iterable[int]], rewinds: int | None = None
    ) -> "SkippedBatches":
        """Return a copy with more skipped ranges, which may overlap.

        Args:     rewinds: number of rewinds that led to these ranges. None: one per range.
        """
        found = sorted((first, first + count) for first, count in [*self.ranges, *ranges] if count)
        merged: list[list[int]] = []
        for first, end in found:
            if merged and first <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([first, end])
        counted = max(self.rewinds, len(merged) if rewinds is None else rewinds)
        return SkippedBatches(tuple((first, end - first) for first, end in merged), counted)

    def after_rewind(self, first: int, count: int) -> "SkippedBatches":
        """Return a copy with one more range and one more rewind."""
        return self.and_also([(first, count)], self.rewinds + 1)


def read_skipped(run_dir: Path) -> SkippedBatches:
    """Read the skipped batches of a run.

    Raises:   ConfigError if the file is damaged, since ignoring it would change the batches.
    """
    file = run_dir / SKIPPED_FILE
    if not file.is_file():
        return SkippedBatches()
    try:
        said = read_json_object(file, what="it")
        _check(said)
        return SkippedBatches().and_also(said["windows"], said.get("rewinds"))
    except (OSError, ValueError, KeyError) as error:
        rule = f"has a {SKIPPED_FILE} that cannot be read ({error})"
        fix = 'write {"windows": [[FIRST, COUNT], ...]} to it, as in the log, '
        fix += "or delete it: checkpoints after a rewind contain it, too"
        raise ConfigError("run.dir", str(run_dir), rule, fix) from error


def _check(said: dict[str, Any]) -> None:
    """Raises:   ValueError for a range or a number of rewinds that no run can have."""
    windows, rewinds = said["windows"], said.get("rewinds")
    if not isinstance(windows, list):
        raise ValueError("windows must be a list")
    for pair in windows:
        whole = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not whole or not (pair[0] >= 0 and pair[1] >= 1 and sum(pair) <= MAX_INT):
            rule = f"must be a batch and a number of batches, at most {MAX_INT:,} together"
            raise ValueError(f"[FIRST, COUNT] {rule}, not {str(pair)[:80]}")
    if rewinds is not None and (type(rewinds) is not int or not 0 <= rewinds <= MAX_INT):
        raise ValueError(f"rewinds must be a number, not {str(rewinds)[:80]}")


def write_skipped(run_dir: Path, skipped: SkippedBatches) -> None:
    """Write the skipped batches of a run atomically."""
    temporary = run_dir / (SKIPPED_FILE + ".tmp")
    text = json.dumps({"windows": skipped.ranges, "rewinds": skipped.rewinds}) + "\n"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(run_dir / SKIPPED_FILE)
