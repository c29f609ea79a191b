"""Where the time of a compiled step goes: reading profiler traces and optimized HLO. The modules:

    in_run              traces of a run that goes on, and requests for them
    folder              what is in the folder of such a profile
    loading             a profile read: traces of all processes, HLO, memory
    trace               taking a trace, and its kernels by device and step
    cpu_trace           the same of a CPU's
    xspace              the programs inside a trace file
    attribution         which HLO instruction a kernel inside a command buffer computes
    breakdown           compute, communication, exposed and idle time; by class, scope and kernel
    collective_bytes    what the step sends, from its HLO
    costs               least FLOPs and bytes of an instruction
    roofline            of kernels and matmuls, what a GPU could do in their time
    memory              what a step keeps in memory, buffer by buffer
    table               the breakdown as text
    sections            the same of what `python -m jaxpar.profile` shows beside it

The rest is shared by them: HLO text, kernel names, op_names, intervals of time.
"""

MAY_IMPORT = ("config", "runtime", "model", "planning")
