"""Finds the HLO instructions of kernels inside command buffers, from the program's schedule.

The profiler names the instruction of a kernel that was launched separately. For kernels in a
command buffer, which are most of a train step, it names only the buffer. They run in the order of
the schedule, and XLA names a fusion's kernel after the fusion. Between two known kernels, the
sequence of names is therefore matched with the sequence of instructions.
"""

import bisect
import difflib
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from jaxpar.monitoring.hlo import Instruction, Module, shape_of
from jaxpar.tools.profiling.trace.kernels import ATTENTION, MATMUL, MOSAIC, classify, family
from jaxpar.tools.profiling.trace.read import KernelTrace, ProfiledKernel

#: Most pairs to compare in an unanchored range. Larger ranges would take minutes and stay unknown.
MAX_PAIRS = 50_000_000

#: Class of a library call by its target in HLO.
_TARGETS = (("cublas", MATMUL), ("fmha", ATTENTION), (MOSAIC, MOSAIC))


def attribute(trace: KernelTrace, module: Module) -> KernelTrace:
    """Return the trace with instruction, op_name and result shape of kernels, where found."""
    schedule = _Schedule(module)
    known: dict[tuple, list[Instruction | None]] = {}
    devices = {}
    for number, steps in trace.devices.items():
        devices[number] = [_complete(step, schedule, module, known) for step in steps]
    return replace(trace, devices=devices)


class _Schedule:
    """The instructions that launch compute kernels, in order, with loop bodies repeated."""

    def __init__(self, module: Module):
        self.entries = [i for i in module.run_order() if i.opcode in ("fusion", "custom-call")]
        self.tokens = [_token_of(i) for i in self.entries]
        self.names = frozenset(self.tokens)
        self.places: dict[str, list[int]] = defaultdict(list)
        for place, instruction in enumerate(self.entries):
            self.places[instruction.name].append(place)

    def token(self, kernel: ProfiledKernel) -> str:
        """Return the token that a kernel and its instruction share."""
        name = family(kernel.name)
        if MOSAIC in name:
            return MOSAIC
        return name if name in self.names else classify(kernel.name)[0]


def _token_of(instruction: Instruction) -> str:
    if instruction.opcode == "fusion":
        return family(instruction.name.replace(".", "_").replace("-", "_"))
    target = instruction.attribute(r'custom_call_target="([^"]*)"')
    if target.endswith("triton"):  # in profiles from before `jax_triton`
        return family(instruction.attribute(r'\bname = "(\w+)"'))
    if target == "triton_kernel_call":  # in a scope with the kernel's name
        return family(instruction.scope.rpartition("/")[0].rpartition("/")[2])
    return next((what for part, what in _TARGETS if part in target), target)


def _complete(
    step: list[ProfiledKernel],
    schedule: _Schedule,
    module: Module,
    known: dict[tuple, list[Instruction | None]],
) -> list[ProfiledKernel]:
    """Return a step's kernels with their instructions, where found."""
    main = Counter(k.stream for k in step if not k.op).most_common(1)
    stream = main[0][0] if main else ""
    sequence = [k for k in step if k.stream == stream]
    # Most devices and steps run the same sequence, which is matched only once.
    key = tuple((k.op or k.name) for k in sequence)
    if key not in known:
        known[key] = _match(sequence, schedule)
    matched = {id(k): i for k, i in zip(sequence, known[key], strict=True)}
    done = []
    for kernel in step:
        instruction = module.instructions.get(kernel.op) or matched.get(id(kernel))
        if instruction is not None:
            kernel = replace(
                kernel,
                op=kernel.op or instruction.name,
                # For a fusion with several results, the profiler has only their common prefix.
                scope=instruction.scope or kernel.scope,
                result=shape_of(instruction.type),
            )
        done.append(kernel)
    return done


def _match(kernels: Sequence[ProfiledKernel], schedule: _Schedule) -> list[Instruction | None]:
    """Return the instruction of each kernel of a stream; None if not found."""
    tokens = [schedule.token(k) for k in kernels]
    place: dict[int, int] = _anchors(kernels, schedule)
    edges = [(-1, -1), *sorted(place.items()), (len(kernels), len(schedule.entries))]
    for (a, i), (b, j) in itertools.pairwise(edges):
        ours, theirs = tokens[a + 1 : b], schedule.tokens[i + 1 : j]
        if not ours or not theirs or len(ours) * len(theirs) > MAX_PAIRS:
            continue
        matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
        for first, other, size in matcher.get_matching_blocks():
            for n in range(size):
                place[a + 1 + first + n] = i + 1 + other + n
    for at, token in enumerate(tokens):  # a library call may launch several kernels
        if at in place or at - 1 not in place or token not in (MATMUL, ATTENTION):
            continue
        if schedule.tokens[place[at - 1]] == token:
            place[at] = place[at - 1]
    entries = schedule.entries
    return [entries[place[at]] if at in place else None for at in range(len(kernels))]


def _anchors(kernels: Sequence[ProfiledKernel], schedule: _Schedule) -> dict[int, int]:
    """Return the position in the schedule of kernels whose instruction the profiler names.

    For an instruction in a loop, the nth kernel is that of the nth iteration. Only an ascending
    sequence is kept.
    """
    by_op: dict[str, list[int]] = defaultdict(list)
    for at, kernel in enumerate(kernels):
        if kernel.op in schedule.places:
            by_op[kernel.op].append(at)
    pairs = []
    for op, ats in by_op.items():
        places = schedule.places[op]
        each, rest = divmod(len(ats), len(places))
        if rest == 0:
            pairs += [(at, places[n // each]) for n, at in enumerate(ats)]
    return dict(_longest_ascending(sorted(pairs)))


def _longest_ascending(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest subsequence of sorted pairs in which the second value grows too."""
    ends: list[int] = []
    last: list[int] = []
    previous: list[int] = []
    for n, (_, place) in enumerate(pairs):
        at = bisect.bisect_left(ends, place)
        previous.append(last[at - 1] if at else -1)
        if at == len(ends):
            ends.append(place)
            last.append(n)
        else:
            ends[at], last[at] = place, n
    chain, n = [], last[-1] if last else -1
    while n >= 0:
        chain.append(pairs[n])
        n = previous[n]
    return chain[::-1]
