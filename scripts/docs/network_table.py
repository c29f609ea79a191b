"""Makes the table of NCCL's variables by network: python scripts/docs/network_table.py [--write]

The variables are those of `jaxpar/runtime/processes/networks/variables.py`. Without options, prints
the table. --write writes it between the markers of docs/clusters.md.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxpar.runtime.processes.networks.variables import VARIABLES, NetworkVariable  # noqa: E402
from scripts.docs.generated_table import run  # noqa: E402

PAGE, MARK = "clusters.md", "network table"


def where(row: NetworkVariable) -> str:
    """Describe the hosts to which a variable applies; empty for all."""
    words = " ".join((row.where.__doc__ or "").split()).rstrip(".")
    return "" if words == "Every host" else f" ({words[0].lower()}{words[1:]})"


def table() -> str:
    """Return the table as Markdown: a row for each variable, value and reason."""
    merged: dict[tuple[str, str, str, str], tuple[list[str], list[str]]] = {}
    for network, rows in VARIABLES.items():
        for row in rows:
            does = "set" if row.is_set else "shown"
            value = row.value.replace("{", "").replace("}", "")
            key = row.name, value, does, f"{row.why}{where(row)}"
            networks, sources = merged.setdefault(key, ([], []))
            networks.append(f"`{network}`")
            sources += [row.source] * (row.source not in sources)
    lines = ["| networks | variable, sources | value | | why |", "|---|---|---|---|---|"]
    for (name, value, does, why), (networks, (first, *others)) in merged.items():
        more = "".join(f", [{n}]({source})" for n, source in enumerate(others, 2))
        cells = ", ".join(networks), f"[`{name}`]({first}){more}", f"`{value}`", does, why
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run(__doc__, PAGE, MARK, table)
