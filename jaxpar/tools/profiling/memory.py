"""Reads XLA's memory plan of a compiled step: the live buffers over the program.

Nothing here is measured: XLA assigns every buffer when it compiles. A step's memory consists of its
arguments (state and batch, including results that reuse their buffers), other results, and a block
of temporaries. The block has the size of the temporaries at their peak, plus gaps between buffers.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jaxpar.monitoring.hlo import Module, arrays_of, num_bytes, shape_of

_ALLOC, _FREE, _SHARE = 0, 1, 2


@dataclass(frozen=True)
class Buffer:
    """A temporary: its bytes, and the instruction that creates it, with op_name and result."""

    size: int
    instruction: str
    scope: str = ""
    result: str = ""


@dataclass(frozen=True)
class ProgramMemory:
    """The memory of one device in bytes.

    `live` has (instruction, bytes of temporaries) in program order. It and `at_peak` are empty for
    programs from the compilation cache, which does not store them. `given` has the arguments by
    name.
    """

    arguments: int
    results: int
    temporaries: int
    constants: int
    live: list[tuple[str, int]]
    at_peak: list[Buffer]
    given: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Peak of the temporaries."""
        return max((size for _, size in self.live), default=0)

    @property
    def total(self) -> int:
        """Total memory of the step."""
        return self.arguments + self.results + self.temporaries + self.constants


def memory_of(buffers: Any, module: Module | None = None) -> ProgramMemory | None:
    """Return the memory of a program.

    Args:     buffers: `xspace.TracedProgram.buffers`. module: provides scopes and shapes.
    Returns:  None if the trace does not have it, or it is damaged.
    """
    if buffers is None or not buffers.buffer_allocations:
        return None
    sizes = {buffer.id: buffer.size for buffer in buffers.logical_buffers}
    simulated = [trace for trace in buffers.heap_simulator_traces if trace.whole_module_simulation]
    events = max((list(trace.events) for trace in simulated), key=len, default=[])
    temporary = {event.buffer_id for event in events}
    parts: Counter[str] = Counter()
    for allocation in buffers.buffer_allocations:
        parts[_part_of(allocation, temporary)] += allocation.size
    place = {b.id: tuple(b.defined_at.shape_index) for b in buffers.logical_buffers}
    try:
        live, alive = _play(events, sizes)
        at_peak = [_buffer(sizes[n], name, place[n], module) for n, name in alive.items()]
    except LookupError:
        return None  # an event names a buffer that the plan lacks
    return ProgramMemory(
        arguments=parts["arguments"],
        results=parts["results"],
        temporaries=parts["temporaries"],
        constants=parts["constants"],
        live=live,
        at_peak=sorted(at_peak, key=lambda buffer: -buffer.size),
        given=_given(module) if module is not None else {},
    )


def of_sums(sizes: dict[str, int]) -> ProgramMemory:
    """Return only the totals, from the `memory_analysis()` in profile.json."""
    of = lambda name: sizes.get(f"{name}_size_in_bytes", 0)  # noqa: E731
    results = of("output") - of("alias")
    return ProgramMemory(of("argument"), results, of("temp"), 0, live=[], at_peak=[])


def _given(module: Module) -> dict[str, int]:
    """Return the bytes of the arguments by name, summed over each tree, largest first.

    JAX names them state.opt_state[0].mu['embed'] or batch.tokens.
    """
    found: Counter[str] = Counter()
    for instruction in module.computations[module.entry]:
        if instruction.opcode == "parameter" and instruction.scope:
            name = re.split(r"\[\\?'", instruction.scope)[0]
            found[name if name.startswith("state.") else name.split(".")[0]] += num_bytes(
                instruction.type
            )
    return dict(found.most_common())


def _part_of(allocation: Any, temporary: set[int]) -> str:
    if allocation.is_entry_computation_parameter:
        return "arguments"
    if allocation.is_thread_local:
        return "thread local"
    if allocation.is_constant:
        return "constants"
    if any(entry.logical_buffer_id in temporary for entry in allocation.assigned):
        return "temporaries"
    return "results" if allocation.maybe_live_out else "temporaries"


def _play(events: list[Any], sizes: dict[int, int]) -> tuple[list[tuple[str, int]], dict[int, str]]:
    """Return the live bytes after each event, and the buffers at the peak.

    Buffers may share memory, which is freed with the last of them.
    """
    shares_with: dict[int, int] = {}
    users: Counter[int] = Counter()
    made_by: dict[int, str] = {}
    alive: dict[int, str] = {}
    live, now, most, at_peak = [], 0, 0, {}
    for event in events:
        number = event.buffer_id
        if event.kind == _FREE:
            place = shares_with[number]
            users[place] -= 1
            if users[place] == 0:
                now -= sizes[place]
                del alive[place]
        else:
            other = event.share_with_canonical_id
            place = shares_with.get(other, other) if event.kind == _SHARE else number
            shares_with[number] = place
            users[place] += 1
            made_by.setdefault(place, event.instruction_name)
            if users[place] == 1:
                now += sizes[place]
                alive[place] = made_by[place]
        live.append((event.instruction_name, now))
        if now > most:
            most, at_peak = now, dict(alive)
    return live, at_peak


def _buffer(size: int, name: str, place: tuple[int, ...], module: Module | None) -> Buffer:
    """Return a buffer with its scope and shape.

    Args:     place: index in the instruction's result, if it is a tuple.
    """
    instruction = module.instructions.get(name) if module is not None else None
    if instruction is None:
        return Buffer(size, name)
    result, flat = instruction.type, "((" not in instruction.type
    if len(place) == 1 and flat and place[0] < len(arrays := arrays_of(result)):
        dtype, dims = arrays[place[0]]
        return Buffer(size, name, instruction.scope, f"{dtype}[{','.join(map(str, dims))}]")
    return Buffer(size, name, instruction.scope, shape_of(result))
