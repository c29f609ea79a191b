"""The place of a task of Slurm's srun, and whether srun shows it only its own GPUs.

Variables as in the manuals of srun 20.11 to 25.05, section OUTPUT ENVIRONMENT VARIABLES.
"""

import re

from jaxpar.config import ConfigError, flag
from jaxpar.runtime.processes.addresses import joined
from jaxpar.runtime.processes.place import Environment, ProcessPlace, all_of, number

#: A part of SLURM_TRES_PER_TASK that counts GPUs: gres/gpu=2, gres/gpu:h100=2, gres:gpu:h100:2.
_GPUS = re.compile(r"gres[/:]gpu(?:[:=](.*))?")

#: Ways of --gpu-bind that show each task GPUs of its own. Under `closest`, tasks share them.
_BINDING = re.compile(r"single|per_task|map|mask")


def slurm_task(env: Environment, port: int) -> ProcessPlace | None:
    """Return the place of a task of srun; None outside Slurm, and in a job of one task.

    Args:     port: of the coordinator.
    Raises:   ConfigError if srun has not started this process of a job of several tasks, or for
              variables that are incomplete or malformed.
    """
    if not {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"} & env.keys():
        tasks = number(env, "SLURM_NTASKS", 1) if "SLURM_JOB_ID" in env else 1
        if tasks > 1:
            rule = f"the job has {tasks} tasks, but this process was not started by srun"
            fix = f"start it with srun, or as one process with {flag('cluster.detect', 'none')}"
            raise ConfigError("SLURM_NTASKS", env["SLURM_NTASKS"], rule, fix)
        return None
    names = "JOB_ID STEP_NUM_TASKS STEP_NODELIST STEP_NUM_NODES PROCID LOCALID".split()
    values = all_of(env, "slurm", tuple(f"SLURM_{name}" for name in names))
    assert values is not None
    count = number(env, "SLURM_STEP_NUM_TASKS")
    hosts = number(env, "SLURM_STEP_NUM_NODES", least=1)
    local_id = number(env, "SLURM_LOCALID")
    bound = gpus_are_bound(env)
    return ProcessPlace(
        source="slurm",
        coordinator=joined(first_host(env["SLURM_STEP_NODELIST"]), port),
        num_processes=count,
        process_id=number(env, "SLURM_PROCID"),
        num_hosts=hosts,
        local_processes=1 if bound else _tasks_here(env, -(-count // hosts)),
        local_id=0 if bound else local_id,
        bound=bound,
        started=True,
    )


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: "gpu[03-07,12],login1" gives "gpu03".

    Raises:   ConfigError if the list begins with none.
    """
    found = re.match(r"(?:\[[^\]]*\]|[^,\[\]])+", nodes)
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0]) if found else ""
    if not first or "[" in first:
        raise ConfigError("SLURM_STEP_NODELIST", nodes, "names no host", "check what sets it")
    return first


def gpus_are_bound(env: Environment) -> bool:
    """Return whether srun shows this task only its own GPUs.

    `--gpus-per-task` does so, unless `--gpu-bind=none` is given too. SLURM_TRES_PER_TASK may count
    CPUs alone: Slurm 23.11 and later export `--cpus-per-task` in it.

    Raises:   ConfigError for a number of GPUs that is none.
    """
    binding = env.get("SLURM_GPU_BIND", "")
    for part in re.split(r",(?=gres)|\+", env.get("SLURM_TRES_BIND", "")):
        found = _GPUS.fullmatch(part)
        binding += f",{found[1]}" if found and found[1] else ""
    if re.search(r"\bnone\b", binding):
        return False
    asked = 0
    for part in filter(None, env.get("SLURM_GPUS_PER_TASK", "").split(",")):
        asked += _count("SLURM_GPUS_PER_TASK", part.rpartition(":")[2])
    if not asked:
        for part in env.get("SLURM_TRES_PER_TASK", "").split(","):
            if found := _GPUS.fullmatch(part.strip()):
                asked += _count("SLURM_TRES_PER_TASK", re.split("[:=]", found[1] or "1")[-1])
    if asked:
        # A site, or the program before this one, may show each task all GPUs nevertheless.
        visible = env.get("CUDA_VISIBLE_DEVICES", "")
        return len([name for name in visible.split(",") if name.strip()]) <= asked
    return _BINDING.search(binding) is not None


def _count(name: str, text: str) -> int:
    return number({name: text}, name)


def _tasks_here(env: Environment, evenly: int) -> int:
    """Return the number of the step's tasks on this node, from a list such as "8(x2),4"."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    if name not in env or "SLURM_NODEID" not in env:
        return evenly
    counts: list[int] = []
    for part in env[name].split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", part, re.ASCII)
        if not found:
            raise ConfigError(name, env[name], "is not a list of numbers", "check what sets it")
        counts += [int(found[1])] * int(found[2] or 1)
    node = number(env, "SLURM_NODEID")
    if node >= len(counts):
        rule = f"is not one of the {len(counts)} nodes of {name}"
        raise ConfigError("SLURM_NODEID", node, rule, "check what sets it")
    return counts[node]
