"""DiLoCo: each replica is a trainer with its own weights and moments, which an outer step joins.

Inside the train step, a trainer is what a run is without DiLoCo: `inner.py` takes its state out of
the replicas' and puts it back. `outer.py` is a program of its own, every `diloco.every` steps. With
an overlap, `overlap.py` exchanges outer gradients beside inner steps instead.

Source:   Douillard et al. 2023 (2311.08105), algorithm 1; Douillard et al. 2025 (2501.18512) for
          fragments.
"""
