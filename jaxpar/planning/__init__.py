"""Predicts memory, step time and cost of a config before it runs.

Nothing here starts a device. `predict/memory.py` and `predict/time.py` predict one layout.
`layouts.py` lists the valid layouts, and `ranking.py` sorts them. `predict/hardware.py` has the
figures of GPUs and networks. docs/planning.md explains the predictions and compares them with
measurements.
"""

MAY_IMPORT = (
    "components",
    "config",
    "runtime",
    "sharding",
    "kernels",
    "execution",
    "parallel",
    "model",
    "optimizer",
    "step",
    "stores",
)
