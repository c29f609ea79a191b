"""The folder of a profile: RUN/profiles/step_00000100, named by its first step.

    profile.json       the steps, the devices and XLA's memory analysis
    step.hlo.txt.gz    the optimized HLO of the step
    plugins/profile/step_00000100/process_N.xplane.pb       a trace from each process
    plugins/profile/step_00000100/process_N.trace.json.gz   the same for Perfetto

XProf and TensorBoard accept the folder as `--logdir`.
"""

import dataclasses
import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.config.json_reader import read_json_object

FACTS_FILE = "profile.json"
HLO_FILE = "step.hlo.txt.gz"

_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class ProfileFacts:
    """Facts that the trace does not contain.

    memory is `memory_analysis()` of the step, in bytes per device. flops are the model's FLOPs in a
    step on all devices, with causal attention. attention_flops are those of the attention kernels:
    14 H K per pair of a query and a key, forward and backward; None for sliding windows.
    """

    first_step: int
    num_steps: int
    processes: int
    devices: int
    device_kind: str
    mesh: str
    tokens: int
    flops: float
    attention_flops: float | None
    memory: dict[str, int]
    versions: dict[str, str]

    @property
    def attention_flops_per_device(self) -> float | None:
        """FLOPs of one device's attention kernels in a step."""
        return None if self.attention_flops is None else self.attention_flops / self.devices


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the folder of the profile that begins with a step."""
    return run_dir / "profiles" / f"step_{step:08d}"


def profiles_of(run_dir: Path) -> dict[int, Path]:
    """Return the folders of a run's profiles by first step, in order."""
    found = [(_NAME.fullmatch(path.name), path) for path in (run_dir / "profiles").glob("step_*")]
    return dict(sorted((int(name[1]), path) for name, path in found if name))


def trace_folder(folder: Path) -> Path:
    """Return the folder of the traces in a profile's folder."""
    return folder / "plugins" / "profile" / folder.name


def write_facts(folder: Path, facts: ProfileFacts) -> None:
    """Write profile.json."""
    text = json.dumps(dataclasses.asdict(facts), indent=2) + "\n"
    (folder / FACTS_FILE).write_text(text, "utf-8")


def read_facts(folder: Path) -> ProfileFacts | None:
    """Read profile.json; None if it is missing, damaged or from another version."""
    try:
        values: dict[str, Any] = read_json_object(folder / FACTS_FILE)
        facts = ProfileFacts(**values)
    except (OSError, ValueError, TypeError):
        return None
    return facts if _sound(facts) else None


def _sound(facts: ProfileFacts) -> bool:
    """Return whether the values have their types and valid ranges."""
    counts = (facts.first_step, facts.num_steps, facts.processes, facts.devices, facts.tokens)
    flops = (facts.flops, 0 if facts.attention_flops is None else facts.attention_flops)
    texts, tables = (facts.device_kind, facts.mesh), (facts.memory, facts.versions)
    return (
        all(_is_number(n, int) and n > 0 for n in counts)
        and all(_is_number(n, int | float) and n >= 0 for n in flops)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(table, dict) for table in tables)
        and all(_is_number(n, int) for n in facts.memory.values())
    )


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and abs(value) < 1e30


def write_hlo(folder: Path, text: str) -> None:
    """Write the compressed HLO."""
    (folder / HLO_FILE).write_bytes(gzip.compress(text.encode(), 6))


def num_bytes(folder: Path) -> int:
    """Return the total size of the files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
