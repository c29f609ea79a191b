"""Writes a report of one or more runs: a single self-contained HTML file."""

MAY_IMPORT = (
    "config",
    "runtime",
    "monitoring",
    "certification",
    "tools.profiling",
    "tools.bench",
    "stores",
)
