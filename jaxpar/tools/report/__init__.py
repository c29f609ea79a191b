"""Writes a report of one or more runs: a single self-contained HTML file."""

MAY_IMPORT = (
    "config",
    "runtime",
    "tools.charts",
    "monitoring",
    "tools.profiling",
    "tools.bench",
    "stores",
)
