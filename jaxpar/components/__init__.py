"""What models are composed of: each mixer and each feed-forward is declared in one file.

A component is a frozen dataclass. It declares its fields and its weights, from which every table
that is keyed by the names of weights follows. No file here imports JAX: `--help` and errors in a
config do not wait for it. The computation is in `jaxpar/model`.
"""

MAY_IMPORT = ()
