"""Simulates failures of large runs, to predict their goodput: `python -m jaxpar.goodput`."""

MAY_IMPORT = ("config", "runtime", "charts")
