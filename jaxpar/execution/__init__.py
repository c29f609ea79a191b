"""How a config is executed: every decision for speed, on one page; remat."""

MAY_IMPORT = ("config", "kernels")
