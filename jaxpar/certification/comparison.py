"""Trains each mesh, and compares it with the plain model and optax in float64 on one device."""

import dataclasses
import math
import time
from collections.abc import Iterator

import numpy as np

from jaxpar.certification import distances, failures, small_config, traces
from jaxpar.certification.results import Result, Subject
from jaxpar.certification.traces import Arrays, TrainingTrace
from jaxpar.config import Config
from jaxpar.config.layout.placement import expert_ways
from jaxpar.runtime.stages import stage
from jaxpar.sharding.mesh import axis_sizes, make_mesh

#: The name of this check.
MESHES = "meshes"

#: CPU seconds after which no other of the meshes without --mesh begins, so that all checks take at
#: most 600.
MOST_SECONDS = 300.0


def compare_meshes(subject: Subject) -> Iterator[Result | list[Result]]:
    """Yield the results of each mesh, as soon as it is done."""
    start = time.process_time()
    comparison, failed = Comparing(subject), False
    for name, on_mesh in subject.meshes.items():
        if not subject.given and time.process_time() - start > MOST_SECONDS:
            why = f"meshes took more than {MOST_SECONDS:.0f} CPU seconds: use --mesh {name}"
            yield Result(MESHES, name, "training", not_run=why)
            continue
        with stage(f"training on {name}"):
            found, results = comparison.of(name, on_mesh, subject.steps)
        wrong = [result for result in results if not result.passed]
        if wrong and not failed:
            failed = True
            with stage("looking for the first wrong tensor, and the smallest mesh that shows it"):
                try:
                    detail = comparison.explained(name, on_mesh, found, wrong)
                except Exception as error:  # the mismatch itself is still reported
                    detail = f"the search for the first wrong tensor failed: {error!r}"
            at = results.index(wrong[0])
            results[at] = dataclasses.replace(results[at], detail=detail)
        yield results
    for name, why in subject.left_out.items():
        yield Result(MESHES, name, "training", not_run=why)


class Comparing:
    """The reference, and the comparison of meshes with it."""

    def __init__(self, subject: Subject):
        cfg, steps = subject.small, subject.steps
        self.subject, self.zero = subject, distances.zero_gradients(cfg.model)
        self.batches = [traces.random_batch(cfg, i) for i in range(max(steps, 1))]
        with stage("training the reference"):
            prepare = small_config.with_clipping
            self.wanted = traces.reference_trace(cfg, self.batches, steps, prepare, moved=True)
        self.norm = float(self.wanted.metrics[0]["grad_norm"])
        self.of_first: list[Arrays] = []

    def of(self, name: str, cfg: Config, steps: int) -> tuple[TrainingTrace, list[Result]]:
        """Train a mesh, and return what it did and the results."""
        cfg, tolerance = small_config.with_clipping(cfg, self.norm), self.subject.tolerance
        devices = self.subject.devices
        mesh = make_mesh(cfg.parallel, devices[: math.prod(axis_sizes(cfg.parallel))])
        options = traces.compile_options(devices)
        found = traces.mesh_trace(cfg, mesh, self.batches, steps, options, everything=True)
        self.of_first = self.of_first or found.metrics
        wanted = self._with_metrics(found, cfg)
        compared = distances.compare(found, wanted, tolerance, self.zero, wanted.rounding)
        same_bits = devices[0].platform == "cpu"
        further = distances.further_results(
            MESHES, name, found, wanted, tolerance, self.zero, same_bits=same_bits
        )
        return found, [*compared.results(MESHES, name, steps), *further]

    def _with_metrics(self, found: TrainingTrace, cfg: Config) -> TrainingTrace:
        """Return the reference of as many steps, with the metrics that a mesh should have.

        Those of ranks follow from the loads of experts. Those that the plain model does not compute
        are compared with the first mesh's.
        """
        steps, complete = len(found.losses), []
        for plain, other, here in zip(
            self.wanted.metrics, self.of_first, found.metrics, strict=False
        ):
            right = {name: a for name, a in other.items() if name in here}
            right |= {name: a for name, a in plain.items() if name in here or steps}
            if (ways := expert_ways(cfg.parallel)) > 1 and "expert_rows" in right:
                right |= distances.rank_metrics(np.asarray(right["expert_rows"]), ways)
            right = {n: a for n, a in right.items() if n not in distances.OF_MESH}
            complete.append(right)
        if steps == len(self.wanted.losses):
            return dataclasses.replace(self.wanted, metrics=complete)
        return dataclasses.replace(self.wanted, metrics=complete, losses=[], states={})

    def explained(self, name: str, cfg: Config, found: TrainingTrace, wrong: list[Result]) -> str:
        """Return the first wrong tensor, its layer and direction, and the smallest mesh that shows
        the first of some wrong results."""
        what = wrong[0].what
        steps = 0 if what in ("loss", "gradient", "metrics", "evaluation") else self.subject.steps
        where = failures.first_wrong(cfg, self.subject, self.batches[0], found, self.wanted)

        def fails(mesh: str, smaller: Config) -> bool:
            _, results = self.of(mesh, smaller, steps)
            return any(not result.passed for result in results if result.what == what)

        smallest = failures.smallest(name, self.subject, fails)
        return f"{where}; {smallest}"
