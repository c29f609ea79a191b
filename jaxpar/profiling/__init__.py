"""Shows where a step's time and memory go, from profiler traces and optimized HLO.

in_run              takes traces during a run, on request
folder, facts       the folder of a profile, and facts that the trace does not contain
loading             reads a profile: traces of all processes, HLO, memory
breakdown           compute, communication, exposed and idle time; by class, scope and kernel
roofline            FLOPs, bytes and roofline shares of kernels and matmuls
limits              what limits each kernel, scope and step; the use of tensor cores
launching           calls of the host, its lead, and gaps between kernels
comparison          two profiles, before and after
table, sections     the output of `python -m jaxpar.profile`
marked              marks steps for NVIDIA's profilers
trace/              takes a trace, and reads its kernels by device and step
hlo/                reads HLO: collectives, costs and memory of a program
"""

MAY_IMPORT = ("config", "runtime", "model", "planning")
