"""Charts: the numbers beside an axis, and a chart as a file of its own."""

import re
from importlib import resources
from xml.etree import ElementTree as ET

from jaxpar.tools.charts.chart import Chart, Line, line_chart
from jaxpar.tools.charts.scale import Scale, scale_of, short
from jaxpar.tools.charts.standalone import PALETTE, svg_file


def test_round_numbers_beside_an_axis():
    assert [text for _, text in scale_of([0, 100]).ticks(6)] == ["0", "20", "40", "60", "80", "100"]
    assert [text for _, text in scale_of([0, 2.5e6]).ticks(6)] == [
        "0",
        "500k",
        "1M",
        "1.5M",
        "2M",
        "2.5M",
    ]
    wide = scale_of([0.01, 40], log=True)
    assert wide.log and [text for _, text in wide.ticks(6)] == ["0.01", "0.1", "1", "10"]
    flat = scale_of([0.5, 0.5], least=0.2)
    assert flat.low < 0.5 < flat.high
    assert [short(v) for v in (0, 0.00001, 0.25, 12_345, 3.2e9)] == [
        "0",
        "1e-05",
        "0.25",
        "12.35k",
        "3.2B",
    ]


def test_marks_take_the_place_of_round_numbers():
    scale = Scale(1, 8, log=True, marks=(1, 3, 8))
    assert scale.ticks(6) == [(1, "1"), (3, "3"), (8, "8")]
    assert scale.at(1) == 0 and scale.at(8) == 1


def test_a_chart_is_a_file_of_its_own():
    """It needs no other file, and no text in it becomes markup."""
    x, y = Scale(1, 4, log=True, marks=(1, 2, 4)), Scale(0, 100)
    lines = [Line(run, [(1, 100), (2, 90), (4, 80 - run)], "dots") for run in (0, 1)]
    drawn = line_chart(Chart("Speed <b>", "two & more", x, y, "GPUs", lines))
    root = ET.fromstring(svg_file(drawn, "Speed <b>", "8B & more", ["a <i>", "b"]))
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    texts = [text.text for text in root.iter(f"{space}text")]
    assert {"Speed <b>", "8B & more", "a <i>", "b", "GPUs", "1", "2", "4"} <= set(texts)
    style = root.find(f"{space}style").text
    used = {name for node in root.iter() for name in node.get("class", "").split()}
    assert {"r0", "r1"} <= used and all(f".{name}" in style for name in used)
    assert "var(" not in style  # which other viewers than browsers ignore
    assert not list(root.iter(f"{space}b"))


def test_its_colors_are_the_reports():
    sheet = resources.files("jaxpar.tools.report").joinpath("page.css").read_text("utf-8")
    light = sheet.partition("@media")[0]
    assert re.findall(r"--c\d: (#\w+)", light) == list(PALETTE)
