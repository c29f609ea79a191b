"""Batches that a run leaves out: which batch each step then takes, still by arithmetic alone."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxpar.config import ConfigError

#: In the run's folder, from the moment when batches are left out; checkpoints carry it, too.
SKIPPED_FILE = "skipped_batches.json"


@dataclass(frozen=True)
class SkippedBatches:
    """Ranges of batches, as (first, count): ascending, disjoint, none empty."""

    ranges: tuple[tuple[int, int], ...] = ()
    rewinds: int = 0
    """How often the run has gone back; `ranges` do not tell, since adjacent ones are merged."""

    def __str__(self) -> str:
        texts = [
            f"{first} to {first + count - 1}" if count > 1 else f"{first}"
            for first, count in self.ranges
        ]
        return f"batches {', '.join(texts)}" if texts else "no batches"

    def batch_of(self, step: int) -> int:
        """The batch that a step takes: its own number, past every range left out before it."""
        batch = step
        for first, count in self.ranges:
            if batch < first:
                break
            batch += count
        return batch

    def and_also(
        self, ranges: Iterable[Iterable[int]], rewinds: int | None = None
    ) -> "SkippedBatches":
        """With more ranges left out; where they overlap, once.

        Args:     rewinds: how many led to these ranges. None: one for each range.
        """
        batches = {b for first, count in self.ranges for b in range(first, first + count)}
        batches |= {b for first, count in ranges for b in range(first, first + count)}
        merged: list[list[int]] = []
        for batch in sorted(batches):
            if merged and batch == sum(merged[-1]):
                merged[-1][1] += 1
            else:
                merged.append([batch, 1])
        counted = max(self.rewinds, len(merged) if rewinds is None else rewinds)
        return SkippedBatches(tuple((first, count) for first, count in merged), counted)

    def after_rewind(self, first: int, count: int) -> "SkippedBatches":
        """With one more range left out, by one more rewind."""
        return self.and_also([(first, count)], self.rewinds + 1)


def read_skipped(run_dir: Path) -> SkippedBatches:
    """What a run's folder says is left out.

    Raises:   ConfigError when the file is damaged: to pass it over would give other batches.
    """
    file = run_dir / SKIPPED_FILE
    if not file.is_file():
        return SkippedBatches()
    try:
        said = json.loads(file.read_text("utf-8"))
        return SkippedBatches().and_also(said["windows"], said.get("rewinds"))
    except (ValueError, KeyError, TypeError) as error:
        rule = f"has a {SKIPPED_FILE} that cannot be read ({error})"
        fix = 'write {"windows": [[FIRST, COUNT], ...]} into it, as the console told, '
        fix += "or delete it: a checkpoint from after a rewind knows them, too"
        raise ConfigError("run.dir", str(run_dir), rule, fix) from error


def write_skipped(run_dir: Path, skipped: SkippedBatches) -> None:
    """Write it down, at once or not at all."""
    temporary = run_dir / (SKIPPED_FILE + ".tmp")
    text = json.dumps({"windows": skipped.ranges, "rewinds": skipped.rewinds}) + "\n"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(run_dir / SKIPPED_FILE)
