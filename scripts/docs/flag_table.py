"""Prints the table of XLA flags that docs/profiling.md has on the site.

The flags are those of `jaxpar/execution/xla_flag_table.py`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxpar.execution.xla_flag_table import FLAGS, Flag  # noqa: E402


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


if __name__ == "__main__":
    print(table(), end="")
