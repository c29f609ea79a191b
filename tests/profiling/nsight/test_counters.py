"""Counters from the output of ncu, in its format but written by hand."""

from pathlib import Path

import pytest

from jaxpar.profiling.nsight import counters

RAW = (Path(__file__).parent / "raw.csv").read_text("utf-8")


def test_counters_of_two_kernels():
    product, fusion = counters.parse(RAW)
    assert product.name.startswith("nvjet_sm90") and fusion.name == "loop_add_multiply_fusion_17"
    assert product.microseconds == pytest.approx(1280)
    assert product.tensor_pipe == 88.2 and fusion.tensor_pipe == 0
    assert product.bytes_per_second == pytest.approx(1.0245e12)
    assert (product.dram, product.sm, product.memory) == (31.4, 90.5, 52.1)
    assert product.stalls == {"long_scoreboard": 0.75, "wait": 0.25}
    assert fusion.stalls == {"long_scoreboard": 1.0}, "n/a is not measured"


def test_limits():
    product, fusion = counters.parse(RAW)
    assert counters.bound_of(product).startswith("compute")
    assert counters.bound_of(fusion) == "memory: device memory is the busiest"
    cached = counters.parse(RAW.replace('"90.10"', '"9.10"'))[1]
    assert "a cache or shared memory" in counters.bound_of(cached)
    idle = counters.parse(RAW.replace('"90.50"', '"20.50"'))[0]
    assert counters.bound_of(idle).startswith("latency")
    less = counters.parse(RAW.replace("sm__throughput", "sm__other"))[0]
    assert counters.bound_of(less).startswith("unknown")


def test_in_words():
    text = counters.in_words(counters.parse(RAW))
    assert "  device memory    31.4%, 1,024 GB/s" in text
    assert "  occupancy        18.3% of 18.8% possible" in text
    assert "(132, 1, 1), block (384, 1, 1), 168 registers, 1.00 waves" in text
    assert "  waits            long_scoreboard 75%   wait 25%" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no line begins with"),
        ("==ERROR== nothing", "no line begins with"),
        (RAW.partition('"",')[0], "the row of units is missing"),
        (
            RAW.replace('"","","","","","","","","","","",', '"7","","","","","","","","","","",'),
            "units",
        ),
    ],
)
def test_other_texts(text, why):
    with pytest.raises(counters.NotCounters, match=why):
        counters.parse(text)


def test_rows_that_are_cut_off_are_left_out():
    assert len(counters.parse(RAW[:-20])) == 1


def test_a_product_on_an_h100():
    """Real: columns of ncu 2025.3.1's output for a product of 4,096 x 4,096 in bfloat16."""
    text = (Path(__file__).parent / "h100.csv").read_text("utf-8")
    (product,) = counters.parse(text)
    assert product.name == "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
    assert product.microseconds == pytest.approx(174.8, abs=0.1)
    flops = 2 * 4096**3 / (product.microseconds * 1e-6)
    assert product.tensor_pipe == product.sm == pytest.approx(89.8, abs=0.1)
    assert 0.75 < flops / 989e12 < product.tensor_pipe / 100
    assert product.bytes_per_second == pytest.approx(743e9, rel=0.01)
    assert counters.bound_of(product).startswith("compute")
    assert next(iter(product.stalls)) == "barrier"
    assert "14.6% of 18.8% possible" in counters.in_words([product])
