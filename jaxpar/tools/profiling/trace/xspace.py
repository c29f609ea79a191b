"""Reads the programs in a trace file, which `jax.profiler.ProfileData` does not expose.

The file is a protocol buffer, XSpace. Its plane /host:metadata has XLA's HloProto of each program
that ran: instructions and buffer assignment. The messages below declare only the fields that are
read; protobuf skips all others.

Source:   openxla/xla, xla/tsl/profiler/protobuf/xplane.proto and xla/service/hlo.proto.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from jaxpar.jax_private.table import HLO
from jaxpar.runtime.files import gzipped

_MESSAGES = {
    "XSpace": "planes:1:*XPlane",
    "XPlane": "name:2:string event_metadata:4:*EventEntry stat_metadata:5:*StatEntry",
    "EventEntry": "key:1:int64 value:2:EventMetadata",
    "EventMetadata": "name:2:string stats:5:*Stat",
    "StatEntry": "key:1:int64 value:2:StatMetadata",
    "StatMetadata": "name:2:string",
    "Stat": "metadata_id:1:int64 bytes_value:6:bytes",
    "HloProto": "hlo_module:1:bytes buffer_assignment:3:BufferAssignment",
    "BufferAssignment": "logical_buffers:1:*LogicalBuffer buffer_allocations:3:*Allocation "
    "heap_simulator_traces:4:*HeapTrace",
    "LogicalBuffer": "id:1:int64 size:2:int64 defined_at:3:Location color:4:int64",
    "Location": "shape_index:3:*int64",
    "Allocation": "index:1:int64 size:2:int64 is_thread_local:3:bool "
    "is_entry_computation_parameter:5:bool maybe_live_out:7:bool color:8:int64 "
    "assigned:9:*Assigned is_constant:12:bool",
    "Assigned": "logical_buffer_id:1:int64 offset:2:int64 size:3:int64",
    "HeapTrace": "events:1:*HeapEvent whole_module_simulation:2:bool",
    "HeapEvent": "kind:1:int64 buffer_id:2:int64 instruction_name:4:string "
    "share_with_canonical_id:5:int64",
}

_HLO_STAT = "Hlo Proto"

#: Maximum bytes of a trace, decompressed. Reading it takes a few times as much memory.
MAX_BYTES = 1 << 29


class NotATrace(ValueError):
    """Raised for a file that is not a trace, or is truncated."""


@dataclass(frozen=True)
class TracedProgram:
    """A program of a trace: its HloModuleProto, and the message BufferAssignment."""

    hlo_module: bytes
    buffers: Any

    def hlo_text(self) -> str:
        """Return the HLO text; "" if the trace has no program, or this jaxlib cannot write it."""
        if not self.hlo_module:
            return ""
        try:
            module = HLO.load().HloModule
        except ImportError:
            return ""
        return module.from_serialized_hlo_module_proto(self.hlo_module).to_string()


def read_bytes(path: str | Path) -> bytes:
    """Read a trace file, which may be compressed (.gz).

    Raises:   NotATrace if it cannot be decompressed, or has more than MAX_BYTES.
    """
    try:
        return gzipped.read_bytes(Path(path), MAX_BYTES)
    except gzipped.NotReadable as error:
        raise not_a_trace(path, error) from error


def not_a_trace(path: str | Path, error: Exception) -> NotATrace:
    """Return the error for a file that cannot be read as a trace."""
    return NotATrace(f"{path} is not a profiler trace or is truncated: {error}")


@functools.cache
def _classes() -> dict[str, Any]:
    return message_classes(_MESSAGES)


def message_classes(messages: Mapping[str, str]) -> dict[str, Any]:
    """Build the class of each message. Fields that are not declared are kept when it is written.

    Args:     messages: fields of each message by its name: name:number:type, * before the type if
              it is repeated.
    """
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="trace.proto", package="t", syntax="proto3")
    for made, fields in messages.items():
        to = file.message_type.add(name=made)
        for text in fields.split():
            known, number, kind = text.split(":")
            entry = to.field.add(name=known, number=int(number))
            entry.label = field.LABEL_REPEATED if kind[0] == "*" else field.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            if kind in messages:
                entry.type, entry.type_name = field.TYPE_MESSAGE, f".t.{kind}"
            else:
                entry.type = getattr(field, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"t.{name}")) for name in messages}


def programs(path: str | Path) -> dict[str, list[TracedProgram]]:
    """Return the programs of a trace file by module name, such as jit_train_step.

    A process that has trained several models has several programs of that name.

    Raises:   NotATrace if the file cannot be parsed.
    """
    try:
        space = _classes()["XSpace"].FromString(read_bytes(path))
        found: dict[str, list[TracedProgram]] = {}
        for plane in space.planes:
            if plane.name == "/host:metadata":
                for name, program in _programs_of(plane):
                    found.setdefault(name, []).append(program)
        return found
    except message.DecodeError as error:
        raise not_a_trace(path, error) from error


def program_of(candidates: Sequence[TracedProgram], text: str) -> TracedProgram | None:
    """Return the program with an HLO text, of those with its name; None if there is none.

    Args:     text: of which only the layout of the arguments and results is compared, the first
              line as far as the trace has it. "": the last program.
    """
    if len(candidates) > 1 and text:
        headers = [one.hlo_text().partition("\n")[0] for one in candidates]
        pairs = zip(candidates, headers, strict=True)
        candidates = [one for one, header in pairs if header and text.startswith(header)]
    return candidates[-1] if candidates else None


def _programs_of(plane: Any) -> Iterator[tuple[str, TracedProgram]]:
    names = {entry.key: entry.value.name for entry in plane.stat_metadata}
    for entry in plane.event_metadata:
        for stat in entry.value.stats:
            if names.get(stat.metadata_id) == _HLO_STAT:
                proto = _classes()["HloProto"].FromString(stat.bytes_value)
                name = re.sub(r"\(\d+\)$", "", entry.value.name)
                yield name, TracedProgram(proto.hlo_module, proto.buffer_assignment)
