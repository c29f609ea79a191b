"""How a config is executed: every performance decision on one page, and rematerialization."""

MAY_IMPORT = ("components", "config", "kernels")
