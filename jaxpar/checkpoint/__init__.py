"""Checkpoints: the training state on disk, written in the background, readable under any mesh.

RUN/checkpoints/STEP holds {"step", "params", "opt_state"}, and what features keep, by name:
unsharded arrays, with layers in the model's order. They do not depend on the mesh that wrote them,
so any other mesh can restore them. The folder also holds the config, so it is self-contained. Every
array has a fingerprint, which every load verifies.

    Checkpointer                             for the training loop: saves
    starting_step, restore_latest, restore   for a run: resumes, or explains why it cannot
    read_whole, load_config, restore_params  for all other programs: reads a model
    first_whole, require_whole               finds the step that a program can use

A name is imported when it is first used: a command's options need no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar.checkpoint.best import Step, step_of
    from jaxpar.checkpoint.copies import HostCopy
    from jaxpar.checkpoint.inspection import require_whole
    from jaxpar.checkpoint.integrity import Damaged
    from jaxpar.checkpoint.loading import check_resumable, restore, restore_latest, restore_params
    from jaxpar.checkpoint.saved import (
        MODEL_FIELDS,
        NO_DATASET,
        Saved,
        changed_fields,
        first_whole,
        folder,
        load_config,
        read_saved,
        read_whole,
        saved_steps,
        starting_step,
    )
    from jaxpar.checkpoint.saving import Checkpointer, SaveFailed

MAY_IMPORT = ("config", "runtime", "sharding", "optimizer", "step", "data", "stores")

_MODULES = {
    "Checkpointer": "jaxpar.checkpoint.saving",
    "Damaged": "jaxpar.checkpoint.integrity",
    "HostCopy": "jaxpar.checkpoint.copies",
    "MODEL_FIELDS": "jaxpar.checkpoint.saved",
    "NO_DATASET": "jaxpar.checkpoint.saved",
    "SaveFailed": "jaxpar.checkpoint.saving",
    "Saved": "jaxpar.checkpoint.saved",
    "Step": "jaxpar.checkpoint.best",
    "changed_fields": "jaxpar.checkpoint.saved",
    "check_resumable": "jaxpar.checkpoint.loading",
    "first_whole": "jaxpar.checkpoint.saved",
    "folder": "jaxpar.checkpoint.saved",
    "load_config": "jaxpar.checkpoint.saved",
    "read_saved": "jaxpar.checkpoint.saved",
    "read_whole": "jaxpar.checkpoint.saved",
    "require_whole": "jaxpar.checkpoint.inspection",
    "restore": "jaxpar.checkpoint.loading",
    "restore_latest": "jaxpar.checkpoint.loading",
    "restore_params": "jaxpar.checkpoint.loading",
    "saved_steps": "jaxpar.checkpoint.saved",
    "starting_step": "jaxpar.checkpoint.saved",
    "step_of": "jaxpar.checkpoint.best",
}

__all__ = [
    "MODEL_FIELDS",
    "NO_DATASET",
    "Checkpointer",
    "Damaged",
    "HostCopy",
    "SaveFailed",
    "Saved",
    "Step",
    "changed_fields",
    "check_resumable",
    "first_whole",
    "folder",
    "load_config",
    "read_saved",
    "read_whole",
    "require_whole",
    "restore",
    "restore_latest",
    "restore_params",
    "saved_steps",
    "starting_step",
    "step_of",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxpar.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
