"""The memory of a host, and what control groups leave of it."""

import os
from pathlib import Path

import pytest

from jaxpar.runtime.host_memory import host_memory

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
GIB = 1 << 30

#: What version 1 says without a limit.
UNLIMITED = "9223372036854771712"

#: Limits by file below /sys/fs/cgroup, the lines of /proc/self/cgroup, and the memory left.
CASES = {
    "none": ({}, "", None),
    "version 2, in a container": ({"memory.max": "1073741824"}, "0::/", GIB),
    "version 2, no limit": ({"memory.max": "max"}, "0::/", None),
    "version 2, a service": (
        {"system.slice/train.service/memory.max": "1073741824", "system.slice/memory.max": "max"},
        "0::/system.slice/train.service",
        GIB,
    ),
    "version 2, a group above": (
        {"job/memory.max": "1073741824", "job/step/task/memory.max": "2147483648"},
        "0::/job/step/task",
        GIB,
    ),
    "version 1, a container": ({"memory/memory.limit_in_bytes": "1073741824"}, "", GIB),
    "version 1, its own group": (
        {
            "memory/memory.limit_in_bytes": UNLIMITED,
            "memory/slurm/job_1/memory.limit_in_bytes": "1073741824",
        },
        "5:cpu,cpuacct:/x\n4:memory:/slurm/job_1/step_0\n0::/",
        GIB,
    ),
    "version 1, no limit": ({"memory/memory.limit_in_bytes": UNLIMITED}, "4:memory:/", None),
    "both versions": (
        {"unified/a/memory.max": "max", "memory/a/memory.limit_in_bytes": "1073741824"},
        "4:memory:/a\n0::/a",
        GIB,
    ),
    "a file that is no number": ({"memory.max": ""}, "0::/", None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_least_limit_counts(name, tmp_path: Path):
    limits, lines, left = CASES[name]
    for file, text in limits.items():
        path = tmp_path / "cgroup" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    own = tmp_path / "self"
    own.write_text(lines + "\n" if lines else "")
    assert host_memory(tmp_path / "cgroup", own) == (left or PHYSICAL)


def test_without_control_groups_it_is_the_physical_memory(tmp_path: Path):
    assert host_memory(tmp_path, tmp_path / "nothing") == PHYSICAL
