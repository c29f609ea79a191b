"""Which GPUs of its host a process takes, and whether another process takes the same."""

import os
from collections.abc import Mapping

from jaxpar.config import ConfigError
from jaxpar.config.numerals import only_digits
from jaxpar.runtime.gpus import nvml, pci, visible
from jaxpar.runtime.processes.place import ProcessPlace

#: JAX's variable for the GPUs of a process: indices among those that it sees.
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"


def local_gpus(
    cluster: ProcessPlace, env: Mapping[str, str] = os.environ, present: bool | None = None
) -> list[int] | None:
    """Return this process's share of the visible GPUs; None for all of them.

    JAX_LOCAL_DEVICE_IDS goes before what the launcher says.

    Args:     present: whether the host has GPUs that JAX may use. None: look.
    Raises:   ConfigError if they cannot be shared evenly, or for other values of the variable than
              indices of visible GPUs.
    """
    if not (visible.gpu_is_present() if present is None else present):
        return None
    seen = len(visible.visible_gpu_ids(env))
    if env.get(LOCAL_DEVICES):
        named = env[LOCAL_DEVICES].split(",")
        if not all(only_digits(n) and len(n) < 6 and int(n) < seen for n in named):
            rule, fix = f"is not a list of GPUs from 0 to {seen - 1}", "use, for example, 0,1"
            raise ConfigError(LOCAL_DEVICES, env[LOCAL_DEVICES], rule, fix)
        return [int(n) for n in named]
    shared = cluster.local_processes
    if shared == 1 or seen <= 1:
        return None
    if seen % shared:
        rule = f"{shared} processes of this host cannot share {seen} GPUs evenly"
        fix = "assign GPUs to each process, as srun --gpus-per-task does"
        raise ConfigError("CUDA_VISIBLE_DEVICES", seen, rule, fix)
    if cluster.local_id >= shared:
        rule = f"is not one of the {shared} processes of this host, counted from 0"
        fix = f"name the GPUs of each process: {LOCAL_DEVICES}=0 for the first one"
        raise ConfigError(f"local rank of {cluster.source}", cluster.local_id, rule, fix)
    each = seen // shared
    return list(range(cluster.local_id * each, (cluster.local_id + 1) * each))


def identities(share: list[int] | None) -> list[str]:
    """Return the UUIDs of the GPUs that this process takes; none if they are not known.

    Only the driver knows which GPUs a job's cgroup shows: two processes may both have number 0.

    Args:     share: as `local_gpus` returns it.
    """
    if not visible.gpu_is_present():
        return []
    ids = visible.visible_gpu_ids()
    ids = ids if share is None else [ids[i] for i in share]
    try:
        there = nvml.addresses()
    except nvml.Unavailable:
        there = {}
    found = [
        name
        if name.startswith("MIG-")
        else "".join(there[address] for address in pci.addresses_of([name], there))
        for name in ids
    ]
    return found if all(found) else []


def taken(share: list[int] | None, known: list[str]) -> str:
    """Return what a process took, as "GPU 3 of the 8 that it sees (GPU-...)"."""
    seen = len(visible.visible_gpu_ids())
    own = list(range(seen)) if share is None else share
    names = f" ({', '.join(known)})" if known else ""
    which = f"GPU{'s' * (len(own) != 1)} {','.join(map(str, own))}" if own else "no GPU"
    return f"{which} of the {seen} that it sees{names}"


def check_own(claims: list[tuple[str, list[str]]]) -> None:
    """Check that no two processes take the same GPU.

    Args:     claims: host and UUIDs of each process's GPUs, by rank.
    Raises:   ConfigError that names the first two, and how many GPUs are taken twice.
    """
    first: dict[str, int] = {}
    twice: list[tuple[str, int, int]] = []
    for rank, (_, gpus) in enumerate(claims):
        for gpu in gpus:
            if first.setdefault(gpu, rank) != rank:
                twice.append((gpu, first[gpu], rank))
    if not twice:
        return
    gpu, one, other = twice[0]
    more = len({gpu for gpu, *_ in twice}) - 1
    also = f", and {more} more GPU{'s' * (more > 1)} like it" if more else ""
    rule = f"processes {one} and {other} on {claims[other][0]} both took it{also}"
    fix = "start each process with GPUs of its own: srun --gpus-per-task=1, or set "
    raise ConfigError("GPU", gpu, rule, fix + f"{LOCAL_DEVICES} in each")
