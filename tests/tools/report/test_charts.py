"""Charts: the numbers beside an axis."""

from jaxpar.tools.report.drawing import Scale, short


def test_round_numbers_beside_an_axis():
    texts = lambda high: [text for _, text in Scale(0, high).ticks(6)]  # noqa: E731
    assert texts(105) == ["0", "20", "40", "60", "80", "100"]
    assert texts(2.6e6) == ["0", "500k", "1M", "1.5M", "2M", "2.5M"]
    assert [short(v) for v in (0, 0.00001, 0.25, 12_345, 3.2e9)] == [
        "0",
        "1e-05",
        "0.25",
        "12.35k",
        "3.2B",
    ]
