"""What a config needs and how fast it will be, before it runs: memory, step time, cost.

Nothing here starts a device. `memory.py` and `time.py` predict one layout, `layouts.py` lists
those that `validation` accepts, `ranking.py` puts them in order; `hardware.py` holds the GPUs as
data. docs/planning.md says how the predictions are made, and how far they are from measurements.
"""
