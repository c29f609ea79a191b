"""Shows where a step's time and memory go, from profiler traces and optimized HLO.

loading             reads a profile: traces of all processes, HLO, memory
breakdown           compute, communication, exposed and idle time; by class, scope and kernel
launching           calls of the host, its lead, and gaps between kernels
comparison          two profiles, before and after
table, sections     the output of `python -m jaxpar.profile`
marked              marks steps for NVIDIA's profilers
trace/              reads the kernels of a trace by device and step
hlo/                reads HLO: costs and memory of a program, and what its kernels compute

Profiles are taken by `monitoring/profiler.py`.
"""

MAY_IMPORT = (
    "config",
    "jax_private",
    "runtime",
    "prediction",
    "monitoring",
)
