"""Batches that a run skips after a rewind, and the batch that each step then uses."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from jaxpar.config import ConfigError, declared
from jaxpar.config.json_reader import UnreadableJson
from jaxpar.runtime.files import atomic

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

    def first_step_from(self, batch: int) -> int:
        """Return the first step that uses this batch or a later one."""
        return batch - sum(min(count, max(batch - first, 0)) for first, count in self.ranges)

    def and_also(
        self, ranges: Iterable[Iterable[int]], rewinds: int | None = None
    ) -> "SkippedBatches":
        """Return a copy with more skipped ranges, which may overlap.

        Args:     rewinds: number of rewinds that led to these ranges. None: one per range.
        """
        merged: list[list[int]] = []
        for first, count in sorted((*self.ranges, *map(tuple, ranges))):
            if not count:
                continue
            if merged and first <= sum(merged[-1]):
                merged[-1][1] = max(sum(merged[-1]), first + count) - merged[-1][0]
            else:
                merged.append([first, count])
        counted = max(self.rewinds, len(merged) if rewinds is None else rewinds)
        return SkippedBatches(tuple((first, count) for first, count in merged), counted)

    def after_rewind(self, first: int, count: int) -> "SkippedBatches":
        """Return a copy with one more range and one more rewind."""
        return self.and_also([(first, count)], self.rewinds + 1)


#: A batch's number or the length of a range: steps are int32 on the devices.
type BatchCount = Annotated[int, Meta(ge=0, lt=1 << 31)]

#: A range of batches, as (first, count).
type Range = Annotated[list[BatchCount], Meta(min_length=2, max_length=2)]


class SkipsFile(Struct, frozen=True, kw_only=True):
    """The content of SKIPPED_FILE."""

    windows: list[Range]
    rewinds: BatchCount | None = None
    """None: one per range, in a file that was written by hand."""


def read_skipped(run_dir: Path) -> SkippedBatches:
    """Read the skipped batches of a run.

    Raises:   ConfigError if the file is damaged, since ignoring it would change the batches.
    """
    file = run_dir / SKIPPED_FILE
    if not file.is_file():
        return SkippedBatches()
    try:
        found = declared.read(SkipsFile, file, what="it")
        return SkippedBatches().and_also(found.windows, found.rewinds)
    except UnreadableJson as error:
        rule = f"has a {SKIPPED_FILE} that cannot be read ({error})"
        fix = 'write {"windows": [[FIRST, COUNT], ...]} to it, as in the log, '
        fix += "or delete it: checkpoints after a rewind contain it, too"
        raise ConfigError("run.dir", str(run_dir), rule, fix) from error


def write_skipped(run_dir: Path, skipped: SkippedBatches) -> None:
    """Write the skipped batches of a run atomically."""
    run_dir.mkdir(parents=True, exist_ok=True)  # it may have been deleted
    content = SkipsFile(windows=list(map(list, skipped.ranges)), rewinds=skipped.rewinds)
    atomic.write(run_dir / SKIPPED_FILE, (declared.to_json(content) + "\n").encode())
