"""This process, its peers, its GPUs, its files."""

MAY_IMPORT = ("config", "execution")
