"""Skipped batches as a file may hold them: merged as ranges, and refused unless they are such."""

import json

import numpy as np
import pytest

from jaxpar.config import ConfigError
from jaxpar.data.skips import SKIPPED_FILE, SkippedBatches, read_skipped, write_skipped


def test_ranges_are_merged_as_their_batches_are():
    rng = np.random.default_rng(0)
    for _ in range(200):
        ranges = [(int(first), int(count)) for first, count in rng.integers(0, 12, (5, 2))]
        found = SkippedBatches().and_also(ranges[:2]).and_also(ranges[2:])
        batches = sorted({b for first, count in ranges for b in range(first, first + count)})
        assert [b for first, count in found.ranges for b in range(first, first + count)] == batches
        ends = [first + count for first, count in found.ranges]
        assert all(a < b for a, (b, _) in zip(ends, found.ranges[1:], strict=False))
        assert all(count for _, count in found.ranges)


def test_a_range_of_all_steps_takes_no_time_or_memory(tmp_path):
    write_skipped(tmp_path, SkippedBatches(((0, 2**31 - 1),), 1))
    assert read_skipped(tmp_path).batch_of(5) == 2**31 + 4


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"windows": 5}',
        "{}",
        "[]",
        json.dumps({"windows": [[0, -1]]}),
        json.dumps({"windows": [[0, 10**15]]}),
        json.dumps({"windows": [[0, 1.5]]}),
        json.dumps({"windows": [[0]]}),
        json.dumps({"windows": [], "rewinds": "3"}),
    ],
    ids=range(9),
)
def test_what_is_no_list_of_ranges_is_refused(text, tmp_path):
    (tmp_path / SKIPPED_FILE).write_text(text)
    with pytest.raises(ConfigError, match=f"{SKIPPED_FILE} that cannot be read") as error:
        read_skipped(tmp_path)
    assert "\n" not in str(error.value)
