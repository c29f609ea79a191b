"""Starts another run from a checkpoint of a run, with the optimizer's state: a branch.

A cooldown, another learning rate or another mixture of data from step N on are branches. A branch
has the checkpoint and the files of published weights alone. Its first start continues from there,
as the run itself would, with the fields of its own config.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.saved import (
    CARRIED,
    Saved,
    checkpoint_folder,
    damage,
    read_saved,
    read_whole,
)
from jaxpar.runtime.files.atomic import new_folder
from jaxpar.runtime.files.outputs import refuse_used, require_space
from jaxpar.runtime.units import size


def branch(run_dir: str, new: str, step: int | None, log: Callable[[str], None]) -> int:
    """Copy a checkpoint of a run to the folder of a new one, which appears only when complete.

    Args:     step: a saved step. None: the latest intact one.
    Returns:  the step.
    Raises:   ConfigError if the new folder is in use or cannot be written, or there is no such
              checkpoint; Damaged if it is damaged; Unreadable.
    """
    refuse_used("NEW", Path(new))
    saved = read_whole(run_dir, step, lambda at: intact(run_dir, at))
    source = checkpoint_folder(run_dir) / str(saved.step)
    num_bytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    require_space("NEW", Path(new), num_bytes)
    with new_folder(Path(new)) as made:
        shutil.copytree(source, checkpoint_folder(made) / str(saved.step))
        if (Path(run_dir) / CARRIED).is_dir():
            shutil.copytree(Path(run_dir) / CARRIED, made / CARRIED)
    log(f"branch     {new}: step {saved.step} of {run_dir}, {size(num_bytes)}")
    return saved.step


def intact(run_dir: str, step: int) -> Saved:
    """Return the metadata of a checkpoint whose files and metadata are intact.

    Raises:   ConfigError if there is no such checkpoint; Damaged; Unreadable.
    """
    saved = read_saved(run_dir, step)
    if wrong := damage(run_dir, step):
        raise Damaged(f"the checkpoint of step {step} of {run_dir}", wrong)
    return saved
