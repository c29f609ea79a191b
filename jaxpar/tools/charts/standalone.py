"""Makes an SVG file of a chart, with its own style, title and legend."""

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from jaxpar.tools.charts.chart import COLOURS, HEIGHT, LEFT, RIGHT, WIDTH, color_of
from jaxpar.tools.charts.elements import e

#: Okabe and Ito's colors, darkened where thin lines on white need it, as in the report. Explicit,
#: since few viewers besides browsers know CSS variables.
PALETTE = ("#0072b2", "#d55e00", "#007a5a", "#b0528f", "#a07400", "#2a9bd6", "#444b54")
assert len(PALETTE) == COLOURS

STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:#5b6470}
.title{font-size:15px;font-weight:600;fill:#1b1f24} .under{fill:#5b6470} .key{fill:#1b1f24}
.ground{fill:#fff} .grid{stroke:#dde1e6} .axis{stroke:#5b6470} .cross{visibility:hidden}
.ylabel,.xname{text-anchor:end} .xlabel{text-anchor:middle}
.line{fill:none;stroke-width:2} .thin{stroke-width:1.25} .raw{fill:none;opacity:.45}
.band{stroke:none;opacity:.22} .dots circle{fill:#fff;stroke-width:2}
.dash1{stroke-dasharray:7 3} .dash2{stroke-dasharray:2 3}
""" + "\n".join(f".r{i}{{stroke:{c}}} .band.r{i}{{fill:{c}}}" for i, c in enumerate(PALETTE))

#: Height of the title, and of a row of the legend.
_TITLE, _ROW = 60, 20
#: Columns of the legend.
_COLUMNS = 3


def svg_file(chart: ET.Element, title: str, under: str, legend: Sequence[str]) -> bytes:
    """Return a chart as an SVG file on a white ground.

    Args:     chart: from `chart.line_chart`. under: a line under the title. legend: a name per
              line, in the order of the lines' runs.
    """
    top = _TITLE + _ROW * -(-len(legend) // _COLUMNS)
    height = HEIGHT + top + 8
    made = e(
        "svg",
        e("title", title),
        e("style", STYLE),
        e("rect", class_="ground", width=WIDTH, height=height),
        e("text", title, class_="title", x=LEFT - 42, y=24),
        e("text", under, class_="under", x=LEFT - 42, y=43),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height}",
        width=WIDTH,
        height=height,
    )
    made.extend(_key(run, name) for run, name in enumerate(legend))
    drawn = e("g", transform=f"translate(0 {top})", role="img")
    drawn.set("aria-label", chart.get("aria-label", ""))
    drawn.extend(list(chart))
    made.append(drawn)
    return ET.tostring(made, encoding="utf-8", xml_declaration=True) + b"\n"


def _key(run: int, name: str) -> ET.Element:
    """Return an entry of the legend."""
    row, column = divmod(run, _COLUMNS)
    x, y = LEFT + column * (RIGHT - LEFT) / _COLUMNS, _TITLE + _ROW * row + 6
    line = e("path", class_=f"line {color_of(run)}", d="M0 0H24")
    text = e("text", name, class_="key", x=30, y=0, dy="0.35em")
    return e("g", line, text, transform=f"translate({x:.1f} {y})")
