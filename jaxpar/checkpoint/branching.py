"""Starts another run from a checkpoint of a run, with the optimizer's state: a branch.

A cooldown, another learning rate or another mixture of data from step N on are branches. A branch
has the checkpoint alone. Its first start continues from there, as the run itself would, with the
fields of its own config.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.saved import Saved, damage, folder, read_saved, read_whole
from jaxpar.config import ConfigError
from jaxpar.config.rules.paths import check_path
from jaxpar.runtime.progress import size


def branch(run_dir: str, new: str, step: int | None, log: Callable[[str], None]) -> int:
    """Copy a checkpoint of a run to the folder of a new one, which appears only when complete.

    Args:     step: a saved step. None: the latest intact one.
    Returns:  the step.
    Raises:   ConfigError if the new folder exists or cannot be written, or there is no such
              checkpoint; Damaged if it is damaged; Unreadable.
    """
    place = _unused(new)
    saved = read_whole(run_dir, step, lambda at: _intact(run_dir, at))
    source = folder(run_dir) / str(saved.step)
    num_bytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    above = next(parent for parent in place.resolve().parents if parent.exists())
    if (free := shutil.disk_usage(above).free) < num_bytes:
        rule = f"needs {size(num_bytes)} of disk space, but {size(free)} are free"
        raise ConfigError("NEW", new, rule, "free space, or use another folder")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as temporary:
        made = Path(temporary, place.name)
        shutil.copytree(source, folder(made) / str(saved.step))
        made.rename(place)
    log(f"branch     {new}: step {saved.step} of {run_dir}, {size(num_bytes)}")
    return saved.step


def _intact(run_dir: str, step: int) -> Saved:
    saved = read_saved(run_dir, step)
    if wrong := damage(run_dir, step):
        raise Damaged(f"the checkpoint of step {step} of {run_dir}", wrong)
    return saved


def _unused(new: str) -> Path:
    fix = "use a folder that does not exist"
    check_path("NEW", new, fix)
    if Path(new).exists() or Path(new).is_symlink():
        raise ConfigError("NEW", new, "already exists", fix)
    return Path(new)
