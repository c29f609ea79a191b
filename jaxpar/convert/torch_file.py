"""`to-torch`: exports a checkpoint as a plain PyTorch state_dict, which `torch_model` loads.

torch.save writes a pickle; jaxpar runs none. torch is an optional package: it is imported only
here, and by the checks that use `transformers` and PEFT.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.config.packages import require_package
from jaxpar.convert.hf import exporting
from jaxpar.convert.hf.exporting import Export
from jaxpar.convert.safetensors_file import Stored, create_file
from jaxpar.runtime.files import atomic, outputs
from jaxpar.runtime.files.outputs import require_space
from jaxpar.runtime.progress import meter

#: Allowed suffixes of the file's name.
ENDINGS = (".pt", ".pth")


def check_file(file: Path) -> None:
    """Raises:   ConfigError for a file that cannot be written, or has another suffix."""
    outputs.check_file("FILE", str(file), "model.pt", endings=ENDINGS, new=True)
    if (about := file.with_suffix(".json")).exists():
        raise ConfigError("FILE", str(about), "already exists", "use a new file")


def require_torch() -> None:
    """Raises:   ConfigError when torch is not installed."""
    require_package("torch", "to-torch", None, "use `to-hf`, which does not need it")


def to_torch(export: Export, file: Path, log: Callable[[str], None]) -> None:
    """Write FILE.pt, a dict of tensors by name, and FILE.json, the model's fields.

    The weights are first written to a temporary file, which torch.save reads through a memory map.
    This needs little memory, but twice the disk space. Both files appear when they are complete.

    Args:     export: from `exporting.open_export` with `torch_names.PLAIN`. log: called with each
              result.
    Raises:   ConfigError as `check_file`, or when torch is not installed.
    """
    check_file(file)
    require_torch()
    about = file.with_suffix(".json")
    require_space("FILE", file, 2 * export.num_bytes)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=file.parent) as folder:
        stored = create_file(Path(folder) / "weights", export.shapes(), export.dtype)
        with meter(sum(s.num_bytes for s in stored.values())) as progress:
            for entry in export.entries:
                exporting.copy_out(export, entry, stored, progress)
            save(stored, Path(folder) / file.name)
            log(f"wrote {progress.summary(max(s.num_bytes for s in stored.values()))}")
        if export.config.model.mtp_depth:
            log("left out multi-token prediction, which only training computes")
        fields = dataclasses.asdict(export.config.model)
        (Path(folder) / about.name).write_text(json.dumps(fields, indent=2) + "\n")
        atomic.publish(Path(folder, about.name), about)
        atomic.publish(Path(folder, file.name), file)


def save(stored: dict[str, Stored], file: Path) -> None:
    """Save tensors of a file with `torch.save`."""
    import torch

    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

    def tensor(at: Stored) -> torch.Tensor:
        # torch does not know NumPy's bfloat16: pass the bytes, and view them as the dtype.
        raw = np.memmap(at.file, np.uint8, "r+", at.offset, (at.num_bytes,))
        return torch.from_numpy(raw).view(kinds[at.dtype]).reshape(at.shape)

    torch.save({name: tensor(at) for name, at in stored.items()}, file)
