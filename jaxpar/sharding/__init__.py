"""Names of axes, the mesh, ParamSpec, Batch."""

MAY_IMPORT = ("config",)
