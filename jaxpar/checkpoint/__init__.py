"""Checkpoints: the training state on disk, written in the background, readable under any mesh.

RUN/checkpoints/STEP holds {"step", "params", "opt_state"}, and what features keep, by name:
unsharded arrays, with layers in the model's order. They do not depend on the mesh that wrote them,
so any other mesh can restore them. The folder also holds the config, so it is self-contained. Every
array has a fingerprint, which every load verifies.

    saving.py     writes them
    saved.py      finds those of a run, and reads their configs
    loading.py    restores a state, or only parameters, on any mesh
"""

MAY_IMPORT = ("config", "runtime", "sharding", "optimizer", "step", "data", "stores")
