"""Cut a small piece out of a profiler trace, to test with: scripts/measure/trim_trace.py TRACE OUT

Keeps the first kernels of chosen launches in the last steps, the host's calls that launched them,
and the facts of the GPU; and beside it, as OUT.hlo.txt.gz, the instructions that they run.

    python scripts/measure/trim_trace.py runs/trace/vm.xplane.pb tests/tools/profiling/h100 \\
      --launches 16,17 --kernels 150 --steps 2
"""

import argparse
import gzip
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from jaxpar.monitoring import hlo
from jaxpar.tools.profiling.attribution import attribute
from jaxpar.tools.profiling.loading import load
from jaxpar.tools.profiling.trace import xspace

#: The messages of a trace, as far as they are cut. Source: tsl/profiler/protobuf/xplane.proto.
MESSAGES = {
    "XSpace": "planes:1:*XPlane",
    "XPlane": "name:2:string lines:3:*XLine event_metadata:4:*EventEntry "
    "stat_metadata:5:*StatEntry stats:6:*Stat",
    "XLine": "name:2:string timestamp_ns:3:int64 events:4:*XEvent",
    "XEvent": "metadata_id:1:int64 offset_ps:2:int64 duration_ps:3:int64 stats:4:*Stat",
    "Stat": "metadata_id:1:int64 ref_value:7:uint64",
    "EventEntry": "key:1:int64 value:2:Metadata",
    "StatEntry": "key:1:int64 value:2:Metadata",
    "Metadata": "id:1:int64 name:2:string",
}

#: What is read of an event.
STATS = {
    *("correlation_id", "device_id", "cuda_graph_id", "hlo_op", "hlo_module", "name"),
    "kernel_details",
}


def cut(path: Path, kernels: set[int], calls: set[int], module: str) -> Any:
    """Return the trace with the kernels and calls that start at these nanoseconds."""
    classes = xspace.message_classes(MESSAGES)
    space = classes["XSpace"].FromString(xspace.read_bytes(path))
    for plane in list(space.planes):
        if not re.match(r"/device:GPU:|/host:CPU$", plane.name):
            space.planes.remove(plane)
            continue
        names = {entry.key: entry.value.name for entry in plane.stat_metadata}
        titles = {entry.key: entry.value.name for entry in plane.event_metadata}
        for line in list(plane.lines):
            on_gpu = plane.name != "/host:CPU"
            wanted = []
            for event in line.events:
                start = line.timestamp_ns + event.offset_ps // 1000
                runs = titles[event.metadata_id] == f"{module}:XLA GPU module"
                if start in kernels if on_gpu else start in calls or runs:
                    wanted.append(shortened(event, names))
            del line.events[:]
            line.events.extend(wanted)
            if not wanted or (on_gpu and not line.name.startswith("Stream")):
                plane.lines.remove(line)
        drop_unused_names(plane)
    return space


def shortened(event: Any, names: dict[int, str]) -> Any:
    """Remove the stats of an event that are not read."""
    kept = [stat for stat in event.stats if names[stat.metadata_id] in STATS]
    del event.stats[:]
    event.stats.extend(kept)
    return event


def drop_unused_names(plane: Any) -> None:
    """Remove the names of events and stats that no event has."""
    events = [event for line in plane.lines for event in line.events]
    stats = [*plane.stats, *(stat for event in events for stat in event.stats)]
    used = {event.metadata_id for event in events}
    known = {stat.metadata_id for stat in stats} | {stat.ref_value for stat in stats}
    for entry in [entry for entry in plane.event_metadata if entry.key not in used]:
        plane.event_metadata.remove(entry)
    for entry in [entry for entry in plane.stat_metadata if entry.key not in known]:
        plane.stat_metadata.remove(entry)


def instructions_of(module: hlo.Module, text: str, ops: set[str]) -> str:
    """Return the HLO of some instructions: their lines, operands, and what they call."""
    around = {
        i.name
        for i in module.instructions.values()
        if i.opcode == "while" and any(has(module, body, ops) for body in i.called("body"))
    }
    wanted, operands = ops | around, set()
    for name in wanted:
        operands |= {each.partition("#")[0] for each in module.instructions[name].operands}
    called = {c for name in ops for c in module.instructions[name].called("calls", "to_apply")}
    lines, whole, inside = [], False, False
    for line in text.splitlines():
        name = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
        if begins := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            whole, inside = begins[1] in called, has(module, begins[1], wanted)
            inside = inside or line.startswith("ENTRY")
            line = re.sub(r" \(.*\) -> .* \{$", " () -> () {", line)
        fits = name is None or whole or name[1] in wanted | operands
        if line.startswith("HloModule"):
            lines.append(re.sub(r", entry_computation_layout=.*", "", line))
        elif (whole or inside) and fits:
            lines.append(without_kernels(line))
    return "\n".join(lines) + "\n"


def has(module: hlo.Module, computation: str, names: set[str]) -> bool:
    """Return whether a computation has one of these instructions."""
    return any(i.name in names for i in module.computations.get(computation, ()))


def without_kernels(line: str) -> str:
    """Remove the code of Pallas kernels, and places in the source."""
    line = re.sub(r' (stack_frame_id=\d+|(deduplicated|scheduling)_name="[^"]*")', "", line)
    if "mosaic" in line or "triton" in line:
        name = re.search(r'\bname = "\w+"', line)
        line = re.sub(r", backend_config=.*$", "", line) + (f", {name[0]}" if name else "")
    return line


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", help="OUT.xplane.pb.gz and OUT.hlo.txt.gz are written")
    parser.add_argument("--launches", default="0", help="numbers of the launches of a step")
    parser.add_argument("--kernels", type=int, default=150, help="most kernels of each launch")
    parser.add_argument("--steps", type=int, default=2, help="number of steps, the last ones")
    options = parser.parse_args()
    loaded = load(str(options.trace))
    assert loaded.module is not None, "the trace has no HLO"
    trace = attribute(loaded.trace, loaded.module)
    numbers = set(map(int, options.launches.split(",")))
    starts, calls, ops = set(), set(), set()
    for steps in trace.devices.values():
        for step in steps[-options.steps :]:
            of_call = defaultdict(list)
            for kernel in step:
                of_call[kernel.call].append(kernel)
            for number, (call, kernels) in enumerate(of_call.items()):
                if number not in numbers or call is None:
                    continue
                calls.add(call.start)
                starts |= {kernel.start for kernel in kernels[: options.kernels]}
                ops |= {kernel.op for kernel in kernels[: options.kernels] if kernel.op}
    space = cut(options.trace, starts, calls, trace.module)
    for ending, data in (
        (".xplane.pb.gz", space.SerializeToString()),
        (".hlo.txt.gz", instructions_of(loaded.module, loaded.hlo_text, ops).encode()),
    ):
        path = Path(options.out + ending)
        path.write_bytes(gzip.compress(data, 9, mtime=0))
        print(f"{path}: {path.stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
