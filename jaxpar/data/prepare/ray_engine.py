"""Writes the parts of a dataset on a Ray cluster, whose hosts share its folder or address."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from jaxpar.config import ConfigError
from jaxpar.data.prepare.parts import PartsProgress, Task, write_part
from jaxpar.runtime.exit_codes import RunError

#: How often a part is written again when its process or host dies. Its errors are not tried again.
RETRIES = 8

#: Seconds between two looks at the progress.
LOOK_SECONDS = 1.0


def write_parts(tasks: Sequence[Task], workers: int, progress: PartsProgress) -> None:
    """Write parts, each in its own process.

    Args:     workers: not used: Ray decides how many parts are written at once.
    Raises:   ConfigError without Ray, and for what cannot be read; RunError if the process of a
              part has died too often.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        fix = "run pip install 'jaxpar[ray]'"
        raise ConfigError("--engine", "ray", "needs Ray, which is not installed", fix) from error
    began = not ray.is_initialized()
    if began:
        ray.init(log_to_driver=False)  # the cluster of RAY_ADDRESS, or one of this host
    try:
        reports = ray.remote(num_cpus=0)(Reports).remote()
        write, none = ray.remote(num_cpus=1, max_retries=RETRIES)(_write), cast(Any, None)
        known = {task.number: task for task in tasks}
        tokenizer = ray.put(tasks[0].tokenizer) if tasks else None  # all have the same
        bare = [dataclasses.replace(task, tokenizer=none) for task in tasks]
        waiting = [write.remote(task, tokenizer, reports) for task in bare]
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=LOOK_SECONDS)
            for number, said in ray.get(reports.latest.remote()).items():
                progress.of(known[number])(said)
            try:
                ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise RunError(
                    f"a part was not written in {RETRIES + 1} attempts: {error}"
                ) from error
    finally:
        if began:
            ray.shutdown()


class Reports:
    """Keeps what each part has reported last, in a process of the cluster."""

    def __init__(self) -> None:
        self._latest = dict[int, tuple[int, int]]()

    def say(self, number: int, done: tuple[int, int]) -> None:
        """Keep a report."""
        self._latest[number] = done

    def latest(self) -> dict[int, tuple[int, int]]:
        """Return the last report of each part."""
        return self._latest


def _write(task: Task, tokenizer: Any, reports: Any) -> None:
    whole = dataclasses.replace(task, tokenizer=tokenizer)
    write_part(whole, lambda done: reports.say.remote(task.number, done))
