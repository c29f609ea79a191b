"""Where the time of a compiled step goes: reading profiler traces and optimised HLO. The modules:

    trace               taking a trace, and its kernels by device and step
    attribution         which HLO instruction a kernel inside a command buffer computes
    breakdown           compute, communication, exposed and idle time; by class, scope and kernel
    collective_bytes    what the step sends, from its HLO
    table               the breakdown as text

The rest is shared by them: HLO text, kernel names, op_names, intervals of time.
"""
