"""Checkpoints: the training state on disk, written in the background, readable under any mesh.

RUN/checkpoints/STEP holds {"step", "params", "opt_state", "guard"}: whole arrays, layers in the
model's order. How the writing mesh cut and ordered them leaves no trace, so another mesh restores
them as its own would. The config lies with them: whoever has the folder needs nothing else. What
was written is known by its fingerprints, and every load compares them.

    Checkpointer                             the training loop's: saves
    starting_step, restore_latest, restore   a run's: continues, or says why it cannot
    load_config, restore_params              everybody else's: reads a model
"""

from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.loading import restore, restore_latest, restore_params
from jaxpar.checkpoint.saved import (
    MODEL_FIELDS,
    NO_DATASET,
    Saved,
    changed_fields,
    check_resumable,
    folder,
    load_config,
    read_saved,
    saved_steps,
    starting_step,
)
from jaxpar.checkpoint.saving import Checkpointer, SaveFailed

MAY_IMPORT = ("config", "runtime", "sharding", "optimizer", "step", "data")

__all__ = [
    "MODEL_FIELDS",
    "NO_DATASET",
    "Checkpointer",
    "Damaged",
    "SaveFailed",
    "Saved",
    "changed_fields",
    "check_resumable",
    "folder",
    "load_config",
    "read_saved",
    "restore",
    "restore_latest",
    "restore_params",
    "saved_steps",
    "starting_step",
]
