"""Draws jaxpar's and torchtitan's speed: python scripts/docs/draw_benchmarks.py [--write | --check]

The figures are from the cards of docs/benchmarks. Without options, prints the picture. --write
writes docs/images/torchtitan.svg. --check exits with code 1 if the file differs.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))

from benchmark_table import gpus_of, is_float8, mesh_of, name_of, pairs, release  # noqa: E402

FILE = ROOT / "docs" / "images" / "torchtitan.svg"

STYLE = """
  .ground{fill:#fcfcfd;stroke:#d5d9e0} .ours{fill:#3f63c9} .theirs{fill:#b9c0cc}
  text{font-family:system-ui,-apple-system,"Segoe UI",
  sans-serif;font-size:12px;fill:#20262f} .title{font-size:14px;font-weight:600}
  .small{font-size:11px;fill:#4a5362}
  @media (prefers-color-scheme:dark){ .ground{fill:#1b2028;stroke:#39414e} .ours{fill:#6f8fe8}
  .theirs{fill:#5b6575} text{fill:#e8ebf0} .small{fill:#b6beca} }
"""

#: Sizes in pixels: chart width, start of the bars, torchtitan's bar, row and bar heights, top. The
#: chart also fits a phone.
WIDTH, LEFT, UNIT, ROW, BAR, TOP = 440, 20, 90, 54, 13, 86


def label(card: dict[str, Any]) -> tuple[str, str]:
    """Return the two lines of a row: the model, and its devices and layout."""
    length = card["config"]["data.seq_len"]
    size = f"{card['parameters'] / 1e9:.1f}".removesuffix(".0")
    _, _, mesh = mesh_of(card, named=True).partition(", ")
    kind = card["device"].rpartition("NVIDIA ")[2].split()[0]
    offload = ", offload" if card["config"]["parallel.remat"] == "dots_offload" else ""
    first = name_of(card) or f"{size}B, {length:,} tokens"
    first += (", float8" if is_float8(card) else "") + offload
    return first, f"{gpus_of(card)} × {kind}" + (f", {mesh}" if mesh else "")


def words(x: float, y: float, text: str, name: str = "", anchor: str = "start") -> str:
    """Return a line of text as SVG."""
    style = f' class="{name}"' if name else ""
    return f'<text{style} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'


def bars(y: float, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Draw a bar for each; torchtitan's has the same length in every row."""
    rate, peer = (each["tokens_per_second_per_device"] for each in (ours, theirs))
    first, second = label(ours)
    long = UNIT * rate / peer
    return [
        words(LEFT, y - 6, f'{first} <tspan class="small">· {second}</tspan>'),
        f'<rect class="ours" x="{LEFT}" y="{y}" width="{long:.1f}" height="{BAR}"/>',
        words(LEFT + long + 8, y + 11, f"{rate:,.0f} · {rate / peer:.2f} ×"),
        f'<rect class="theirs" x="{LEFT}" y="{y + BAR + 1}" width="{UNIT}" height="{BAR}"/>',
        words(LEFT + UNIT + 8, y + BAR + 12, f"{peer:,.0f}", "small"),
    ]


def draw() -> str:
    """Return the picture as SVG."""
    rows = pairs()
    height = TOP + ROW * len(rows) - 12
    title = f"Training throughput: jaxpar and torchtitan {release()}"
    under = "Tokens per second per GPU"
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="8"/>',
        words(20, 28, title, "title"),
        words(20, 48, under, "small"),
        f'<rect class="ours" x="{WIDTH - 138}" y="38" width="11" height="11"/>',
        words(WIDTH - 122, 48, "jaxpar", "small"),
        f'<rect class="theirs" x="{WIDTH - 82}" y="38" width="11" height="11"/>',
        words(WIDTH - 66, 48, "torchtitan", "small"),
    ]
    for i, (_, ours, _, theirs) in enumerate(rows):
        body += bars(TOP + ROW * i, ours, theirs)
    return "\n".join([*body, "</svg>"]) + "\n"


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code."""
    if argv not in ([], ["--write"], ["--check"]):
        sys.exit(__doc__)
    made = draw()
    if argv == ["--write"]:
        FILE.write_text(made, "utf-8")
    elif not argv:
        print(made, end="")
    differs = argv == ["--check"] and FILE.read_text("utf-8") != made
    if differs:
        print(f"{FILE.relative_to(ROOT)} differs from the cards")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
