"""Heat maps of loads: cells of the color of their value, axes of whole numbers."""

import pytest

from jaxpar.tools.report.drawing import BOUNDS, HeatMap, Scale, heat_map, level_of


def drawn(values, first_row=0, x=None):
    columns = len(values[0])
    texts = [f"row {i}" for i in range(len(values))]
    x = x or Scale(-0.5, columns - 0.5)
    return heat_map(HeatMap("Loads", "about", values, texts, first_row, x, "experts"))


def paths(made) -> dict[str, str]:
    """Path of each color."""
    found = {p.get("class"): p.get("d") for p in made.iter("path")}
    return {name: d for name, d in found.items() if name.startswith("h")}


@pytest.mark.parametrize(
    ("load", "level"), [(0.0, 0), (0.2, 1), (0.79, 3), (1.0, 4), (1.25, 5), (8.0, 8), (99.0, 8)]
)
def test_a_color_is_a_range_of_loads(load, level):
    assert level_of(load) == level and len(BOUNDS) == 8


def test_adjacent_cells_of_a_color_are_one_box():
    made = drawn([[1.0, 1.0, 3.0, 0.0], [1.0, 0.0, 1.0, 1.0]])
    assert {name: d.count("M") for name, d in paths(made).items()} == {"h0": 2, "h4": 3, "h6": 1}
    assert paths(made)["h6"] == "M303.0 16.0H425.5V46.0H303.0Z"  # the third of four columns


def test_rows_have_texts_and_numbers():
    made = drawn([[1.0, 2.0]] * 12, first_row=3)
    assert [title.text for title in made.iter("title")][1:] == [f"row {i}" for i in range(12)]
    labels = [t.text for t in made.iter("text") if t.get("class") == "ylabel"]
    assert labels == ["4", "6", "8", "10", "12", "14"]


def test_many_rows_stay_in_the_drawing():
    made = drawn([[1.0] * 256] * 94)
    height = float(made.get("viewBox").split()[3])
    assert height < 450
    ends = [float(d.split("V")[1].split("H")[0]) for d in paths(made)["h4"].split("M")[1:]]
    assert max(ends) <= height - 70
