"""Reads and edits XLA's table of autotuned kernels and its autotuning log.

Both are text protocol buffers, written by `--xla_gpu_dump_autotune_results_to` and
`--xla_gpu_dump_autotune_logs_to`. `--xla_gpu_load_autotune_results_from` reads the table. An entry
is identified by the GPU and by a fingerprint of its instruction, with shapes and layouts. XLA uses
it if the versions of all backends match, or that of the entry's backend. Otherwise it tunes again.

Source:   openxla/xla, xla/backends/autotuner/tiered_cache.cc.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_TRIED = re.compile(
    r'instruction_profiles \{\s*hlo_fingerprint: "(\w+)"(.*?)hlo_text: "(.*?)"\n\}', re.DOTALL
)
_CANDIDATE = re.compile(
    r"config_profiles \{\s*config \{\n(.*?)\n    \}\s*run_time \{(.*?)\}", re.DOTALL
)
_ENTRY = re.compile(r"(?:^#[^\n]*\n)*^entries \{\n.*?^\}\n", re.DOTALL | re.MULTILINE)
_VERSION = re.compile(r'per_backend_versions \{\s*key: "(\w+)"\s*value: "([^"]*)"')
_CHOSEN = re.compile(
    r"(optimal_config \{\n)(.*?)(\n    \}\n    optimal_backend_version: )\"[^\"]*\"", re.DOTALL
)


@dataclass(frozen=True)
class AutotunedKernel:
    """A kernel that XLA tried: its config as text, and the time of a short run in us."""

    config: str
    us: float

    @property
    def backend(self) -> str:
        """The backend: CUBLASLT, TRITON, ..."""
        return re.findall(r"backend: (\w+)", self.config)[0]

    def __str__(self) -> str:
        """Describe it briefly: cublaslt 4, or triton 128 256 64 4 8 1 true."""
        tuned = re.findall(r"(\w+): (\w+)", self.config)
        left_out = ("backend", "autotune_workspace_size")
        numbers = [value for name, value in tuned if name not in left_out]
        name = self.backend.lower()
        return " ".join([name, *numbers] if numbers else [name, "0"])


@dataclass(frozen=True)
class Tried:
    """An instruction, its line in the HLO, and the kernels that XLA tried, fastest first."""

    fingerprint: str
    line: str
    candidates: tuple[AutotunedKernel, ...]


def read_log(text: str) -> tuple[Tried, ...]:
    """Return every tuned instruction of a log, once."""
    found = {}
    for fingerprint, body, line in _TRIED.findall(text):
        tried = [AutotunedKernel(config, _us(time)) for config, time in _CANDIDATE.findall(body)]
        fastest_first = tuple(sorted(tried, key=lambda candidate: candidate.us))
        found[fingerprint] = Tried(fingerprint, line.replace('\\"', '"'), fastest_first)
    return tuple(found.values())


def _us(time: str) -> float:
    value = {name: int(number) for name, number in re.findall(r"(\w+): (\d+)", time)}
    return value.get("seconds", 0) * 1e6 + value.get("nanos", 0) / 1e3


def versions(log: str) -> dict[str, str]:
    """Return the version of each backend."""
    return dict(_VERSION.findall(log))


def entries(table: str) -> dict[str, str]:
    """Return the entries of a table by fingerprint, as text with preceding comments."""
    return {re.findall(r'hlo_fingerprint: "(\w+)"', e)[0]: e for e in _ENTRY.findall(table)}


def choice_of(entry: str) -> AutotunedKernel:
    """Return the kernel that an entry chooses, without a time."""
    found = _CHOSEN.search(entry)
    if not found:
        raise ValueError(f"an entry of the table without a choice: {entry[:60]!r}")
    return AutotunedKernel(found[2], 0.0)


def with_choice(entry: str, candidate: AutotunedKernel, version: str) -> str:
    """Return the entry with another choice."""
    take = lambda m: f'{m[1]}{candidate.config.rstrip()}{m[3]}"{version}"'  # noqa: E731
    return _CHOSEN.sub(take, entry, count=1)


def vary_choices(
    table: str, takes: Mapping[str, AutotunedKernel], version: Mapping[str, str]
) -> dict[str, str]:
    """Return the entries of a table by fingerprint, some with another choice."""
    found = entries(table)
    for fingerprint, candidate in takes.items():
        found[fingerprint] = with_choice(found[fingerprint], candidate, version[candidate.backend])
    return found


def text_of(of: Iterable[str]) -> str:
    """Return the table with these entries."""
    return "".join(of)
