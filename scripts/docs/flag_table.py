"""Makes the table of XLA flags: python scripts/docs/flag_table.py [--write]

The flags are those of `jaxpar/execution/xla_flag_table.py`. Without options, prints the table.
--write writes it between the markers of docs/profiling.md.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxpar.execution.xla_flag_table import FLAGS, Flag  # noqa: E402

PAGE = ROOT / "docs" / "profiling.md"
BEGIN, END = "<!-- flag table -->\n", "<!-- /flag table -->"


def where(flag: Flag) -> str:
    """Describe the layouts for which a flag is set."""
    words = " ".join((flag.where.__doc__ or "").split()).rstrip(".")
    return f"{words}; in one process" if flag.one_process else words


def table() -> str:
    """Return the table as Markdown."""
    jax = " and ".join(sorted({f"{flag.jax}x" for flag in FLAGS}))
    lines = [
        f"| `--xla_gpu_…`, JAX {jax} | value | GPU | where | measured |",
        "|---|---|---|---|---|",
    ]
    before = None
    for flag in FLAGS:
        name = flag.name.removeprefix("xla_gpu_")
        why = (where(flag), flag.gain)
        cells = ("as above", "as above") if why == before else why
        row = (f"`{name}`", f"`{flag.value}`", ", ".join(flag.gpus), *cells)
        lines.append(f"| {' | '.join(row)} |")
        before = why
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table or write it to the page."""
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit(__doc__)
    if not sys.argv[1:]:
        print(table(), end="")
        return
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], "utf-8")


if __name__ == "__main__":
    main()
