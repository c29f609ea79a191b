"""A chart of a measurement as a file of its own."""

import re
from importlib import resources
from xml.etree import ElementTree as ET

from scripts.measure.line_chart import (
    PALETTE,
    Chart,
    Line,
    Scale,
    line_chart,
    svg_file,
)


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
