"""The memory that this host or container lets a process use."""

import os
from collections.abc import Iterator
from pathlib import Path

#: Where Linux mounts control groups, and where it lists those of this process.
CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

#: A limit's file, by the version of control groups.
V1, V2 = "memory.limit_in_bytes", "memory.max"


def host_memory(cgroups: Path = CGROUPS, own_groups: Path = OWN_GROUPS) -> int:
    """Return the bytes of memory that this host or container may use.

    The least of the physical memory and the limits of this process's control groups, of version 1
    or 2, and of the groups above them.
    """
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([there, *_limits(cgroups, own_groups)])


def _limits(cgroups: Path, own_groups: Path) -> Iterator[int]:
    for file in _limit_files(cgroups, own_groups):
        try:
            yield int(file.read_text())
        except (OSError, ValueError):  # no such group here, or "max"
            continue


def _limit_files(cgroups: Path, own_groups: Path) -> Iterator[Path]:
    """Yield the files of the limits of this process's groups and of those above.

    In a container, the groups' paths may be those of the host, where the mounted folder is the
    container's own group: the files of the root are always included.
    """
    yield from (cgroups / V2, cgroups / "memory" / V1)
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        within = [*Path(path.lstrip("/")).parents, Path(path.lstrip("/"))]
        if controllers == "":
            yield from (cgroups / group / V2 for group in within)
            yield from (cgroups / "unified" / group / V2 for group in within)
        elif "memory" in controllers.split(","):
            yield from (cgroups / "memory" / group / V1 for group in within)
