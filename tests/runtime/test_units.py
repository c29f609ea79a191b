"""Quantities as people read them."""

import pytest

from jaxpar.runtime.units import binary_size, duration, size, transfer


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00321, "3.21 ms"),
        (0.1, "0.1 s"),
        (11.2, "11.2 s"),
        (187, "3m07s"),
        (7500, "2h05m"),
        (17_280, "4h48m"),  # "0.2 days" says nothing
        (47.9 * 3600, "47h54m"),
        (12.5 * 86_400, "12.5 days"),
        (3e8, "3,472.2 days"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "decimal", "binary"),
    [
        (0, "0 bytes", "0 B"),
        (348, "348 bytes", "348 B"),
        (12_900, "12.9 kB", "12.6 KiB"),
        (50_000, "50.0 kB", "48.8 KiB"),  # not 0.0 MB
        (1_048_576, "1.0 MB", "1 MiB"),
        (1_240_000_000, "1.240 GB", "1.15 GiB"),
        (87.6 * 2**30, "94.060 GB", "87.6 GiB"),
    ],
)
def test_sizes(num_bytes, decimal, binary):
    assert size(num_bytes) == decimal
    assert binary_size(num_bytes) == binary


def test_transfers():
    assert transfer(61e6, 0.2) == "0.061 GB in 0.2 s, 0.30 GB/s"
    assert transfer(0, 0) == "0.000 GB in 0.0 s, 0.00 GB/s"
