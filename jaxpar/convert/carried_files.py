"""The files that come with published weights: config, tokenizer, generation settings."""

import shutil
from pathlib import Path

from jaxpar.convert.hf.folder import CARRIED_FILES


def copy_carried(folder: Path, to: Path) -> None:
    """Copy the files that come with weights: config, tokenizer, generation settings."""
    to.mkdir(exist_ok=True)
    for name in CARRIED_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)
