"""The folder of a profile: RUN/profiles/step_00000100, named by its first step.

    profile.json       the steps, the devices and XLA's memory analysis
    step.hlo.txt.gz    the optimized HLO of the step
    plugins/profile/step_00000100/process_N.xplane.pb       a trace from each process
    plugins/profile/step_00000100/process_N.trace.json.gz   the same for Perfetto

XProf and TensorBoard accept the folder as `--logdir`.
"""

import gzip
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from jaxpar.config import declared
from jaxpar.config.declared import Name
from jaxpar.config.json_reader import UnreadableJson

FACTS_FILE = "profile.json"
HLO_FILE = "step.hlo.txt.gz"

_NAME = re.compile(r"step_(\d{8,})")


type Several = Annotated[int, Meta(ge=1, le=1 << 62)]
type Flops = Annotated[float, Meta(ge=0, lt=1e30)]


@dataclass(frozen=True)
class ProfileFacts:
    """Facts that the trace does not contain.

    memory is `memory_analysis()` of the step, in bytes per device. flops are the model's FLOPs in a
    step on all devices, with causal attention. attention_flops are those of the attention kernels:
    14 H K per pair of a query and a key, forward and backward; None for sliding windows.
    """

    first_step: Several
    num_steps: Several
    processes: Several
    devices: Several
    device_kind: Name
    mesh: Name
    tokens: Several
    flops: Flops
    attention_flops: Flops | None
    memory: dict[Name, Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]]
    versions: dict[Name, Name]

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
    (folder / FACTS_FILE).write_text(declared.to_json(facts, indent=2) + "\n", "utf-8")


def read_facts(folder: Path) -> ProfileFacts | None:
    """Read profile.json; None if it is missing, damaged or from another version."""
    try:
        return declared.read(ProfileFacts, folder / FACTS_FILE)
    except (OSError, UnreadableJson):
        return None


def write_hlo(folder: Path, text: str) -> None:
    """Write the compressed HLO."""
    (folder / HLO_FILE).write_bytes(gzip.compress(text.encode(), 6))


def num_bytes(folder: Path) -> int:
    """Return the total size of the files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
