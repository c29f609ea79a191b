"""Where a run's profiles lie, and what is in one: RUN/profiles/step_00000100, by its first step.

    profile.json       what was traced, on what, and the compiler's figures of its memory
    step.hlo.txt.gz    the optimized HLO of the step
    plugins/profile/step_00000100/process_N.xplane.pb       a trace from each process
    plugins/profile/step_00000100/process_N.trace.json.gz   the same for Perfetto

The folder is one that XProf and TensorBoard take as their `--logdir`.
"""

import dataclasses
import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FACTS_FILE = "profile.json"
HLO_FILE = "step.hlo.txt.gz"

_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class ProfileFacts:
    """What the trace itself does not tell.

    memory is `memory_analysis()` of the step, bytes of one device; flops those of the model in a
    step, over all devices, attention counted as causal. attention_flops are those of the attention
    kernels alone, counted so: 14 H K for each pair of a query and a key, forward and backward; None
    in models with windows.
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


def folder_of(run_dir: Path, step: int) -> Path:
    """The folder of the profile that begins with a step."""
    return run_dir / "profiles" / f"step_{step:08d}"


def profiles_of(run_dir: Path) -> dict[int, Path]:
    """The folders of a run's profiles by their first step, in order."""
    found = [(_NAME.fullmatch(path.name), path) for path in (run_dir / "profiles").glob("step_*")]
    return dict(sorted((int(name[1]), path) for name, path in found if name))


def trace_folder(folder: Path) -> Path:
    """Where the traces lie in a profile's folder."""
    return folder / "plugins" / "profile" / folder.name


def write_facts(folder: Path, facts: ProfileFacts) -> None:
    """Write profile.json."""
    text = json.dumps(dataclasses.asdict(facts), indent=2) + "\n"
    (folder / FACTS_FILE).write_text(text, "utf-8")


def read_facts(folder: Path) -> ProfileFacts | None:
    """What profile.json says; None where there is none, or it is damaged or another version's."""
    try:
        values: dict[str, Any] = json.loads((folder / FACTS_FILE).read_text("utf-8"))
        facts = ProfileFacts(**values)
    except (OSError, ValueError, TypeError):
        return None
    return facts if _sound(facts) else None


def _sound(facts: ProfileFacts) -> bool:
    """Whether the values are of their types, and such that figures can be made of them."""
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
    """Write the HLO, compressed to a twentieth."""
    (folder / HLO_FILE).write_bytes(gzip.compress(text.encode(), 6))


def num_bytes(folder: Path) -> int:
    """What the files of a folder take."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
