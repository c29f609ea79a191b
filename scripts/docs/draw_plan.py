"""Draws the picture of a plan: python scripts/docs/draw_plan.py [--write | --check]

Runs the command and draws its output as a terminal shows it. Without options, prints the picture.
--write writes docs/images/plan.svg. --check exits with code 1 if the file differs.
"""

import contextlib
import io
import os
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from jaxpar.commands import call

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

FILE = ROOT / "docs" / "images" / "plan.svg"
COMMAND = "llama3_8b --gpus 8 --train.global-batch-size 64 --quick --top 3"

#: Columns of the terminal, and the size of a character in pixels.
COLUMNS, WIDE, HIGH, LEFT, TOP = 92, 7.3, 17, 18, 52

STYLE = """
  .ground{fill:#1b2028;stroke:#39414e} .line{fill:#e8ebf0} .head{fill:#8fb0ff} .dim{fill:#9aa4b3}
  text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
  font-size:12px;white-space:pre}
"""


def printed() -> str:
    """Return the output of the plan."""

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        call("plan", COMMAND.split())
    return out.getvalue()


def shown(text: str) -> list[str]:
    """Return the lines of the picture: without trailing spaces, long lines folded."""
    lines: list[str] = []
    for line in text.splitlines():
        line = line.rstrip()
        while len(line) > COLUMNS:
            cut = line.rfind(" ", 0, COLUMNS)
            lines.append(line[:cut])
            line = "  " + line[cut + 1 :]
        if line or (lines and lines[-1]):
            lines.append(line)
    return lines


def draw(text: str) -> str:
    """Return the picture as SVG.

    Args:     text: the output of the plan.
    """
    lines = ["$ python -m jaxpar.plan " + COMMAND, *shown(text)]
    width, height = LEFT * 2 + COLUMNS * WIDE, TOP + HIGH * len(lines) + 8
    title = "python -m jaxpar.plan: the fastest layouts, with their memory and step time by part"
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" x="1" y="1" width="{width - 2:g}" height="{height - 2:g}" rx="9"/>',
        *(
            f'<circle cx="{20 + 18 * i}" cy="20" r="5.5" fill="{fill}"/>'
            for i, fill in enumerate(("#ff5f57", "#febc2e", "#28c840"))
        ),
    ]
    for row, line in enumerate(lines):
        if not line:
            continue
        head = row == 0 or line.startswith((" mesh", "Peak", "Step", "Best layout"))
        name = "dim" if "───" in line else "head" if head else "line"
        # textLength keeps the columns aligned in any font.
        at = f'x="{LEFT}" y="{TOP + HIGH * row}" textLength="{len(line) * WIDE:.1f}"'
        body.append(f'<text class="{name}" {at} xml:space="preserve">{escape(line)}</text>')
    return "\n".join([*body, "</svg>"]) + "\n"


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code."""
    if argv not in ([], ["--write"], ["--check"]):
        sys.exit(__doc__)
    made = draw(printed())
    if argv == ["--write"]:
        FILE.write_text(made, "utf-8")
    elif not argv:
        print(made, end="")
    differs = argv == ["--check"] and FILE.read_text("utf-8") != made
    if differs:
        print(f"{FILE.relative_to(ROOT)} differs from the output of the plan")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
