"""Draws charts as SVG, for reports and benchmarks."""

MAY_IMPORT = ("runtime",)
