"""The count of loss spikes, by scripts/measure/loss_spikes_report.py."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def report():
    name = "loss_spikes_report"
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/measure/{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([5.0] * 20 + [6.1, 5.0], [20]),  # more than 1 nat above
        ([2.0] * 20 + [2.7, 2.0], [20]),  # more than 1.3 times the median
        ([5.0] * 20 + [5.9, 5.0], []),
        ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0], []),  # a falling loss is none
        ([5.0, 5.0, 5.0, 9.0], []),  # too few losses before
        ([5.0] * 20 + [float("nan"), 5.0], [20]),
    ],
)
def test_a_spike_stands_out_from_the_losses_before_it(report, losses, expected):
    assert report.spikes(losses) == expected


def test_a_burst_stands_out_from_the_norms_before_it(report):
    assert report.bursts([20.0] * 5 + [1.0] * 20 + [4.9, 5.1, 1.0]) == [26]


def test_a_variant_is_one_row_and_one_line(report):
    loss = [5.0] * 30 + [7.5] + [4.0] * 29
    calm, burst = [1.0] * 60, [1.0] * 30 + [9.0] + [1.0] * 29
    curves = [
        {"seed": seed, "loss": loss, "grad_norm": norms, "change": [1e-3] * 60}
        for seed, norms in ((3, calm), (4, burst))
    ]
    found = {"variant": "bfloat16", "curves": curves}
    count = report.counts(found)
    assert count["spikes"] == {"3": [30], "4": [30]}
    assert count["spikes_with_a_burst"] == {"3": [], "4": [30]}
    assert report.row("bfloat16", count) == "| bfloat16 | 2 | 2 | 1 | 1 | 2.50 | 4.000 (0.000) |"
    assert report.rounded(found)["counts"] == count
    assert b"bfloat16, 2 runs" in report.picture([found], "152.8M")
