"""Predicts the memory and step time of a config on a number of GPUs, without a device.

`memory.py` and `time.py` predict one layout. `layouts.py` lists the valid layouts, and `ranking.py`
sorts them. `hardware.py` has the figures of GPUs and networks. docs/planning.md explains the
predictions and compares them with measurements.
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
)
