"""What a config needs and how fast it will be, before it runs: memory, step time, cost.

Nothing here starts a device. `planning/predict/memory.py` and `planning/predict/time.py` predict
one layout, `layouts.py` lists those that `validation` accepts, `ranking.py` puts them in order;
`planning/predict/hardware.py` holds the GPUs as data. docs/planning.md says how the predictions are
made, and how far they are from measurements.
"""

MAY_IMPORT = (
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
