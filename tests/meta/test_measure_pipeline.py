"""scripts/measure/pipeline_schedules.py, without running a step."""

import pytest

from scripts.measure import pipeline_schedules as measure


def test_a_case_is_a_schedule_its_virtual_stages_and_a_number_of_microbatches():
    cfg = measure.config_of(measure.BASE, "zero_bubble:2", 8)
    p = cfg.parallel
    assert (p.schedule, p.virtual_stages, p.num_microbatches) == ("zero_bubble", 2, 8)
    assert cfg.train.global_batch_size == 8
    assert measure.config_of(measure.BASE, "gpipe", 4).parallel.virtual_stages == 1


def test_a_line_separates_the_bubble_from_the_microbatches():
    row = lambda name, M, ms: {"schedule": name, "microbatches": M, "ms": ms}  # noqa: E731
    rows = [row("1f1b", M, 50 * (M + 1)) for M in (4, 8, 16)] + [row("gpipe", 4, 1.0)]
    assert measure.fits(rows) == {"1f1b": pytest.approx((50, 50))}
