"""Trains each mesh, and compares it with the plain model and optax on one device."""

import math
from collections.abc import Iterator

from jaxpar.certification import distances, traces
from jaxpar.certification.results import Result, Subject
from jaxpar.runtime.stages import stage
from jaxpar.sharding.mesh import axis_sizes, make_mesh

#: The name of this check.
MESHES = "meshes"


def compare_meshes(subject: Subject) -> Iterator[Result]:
    """Yield the results of each mesh, as soon as it is done."""
    cfg, steps, tolerance = subject.small, subject.steps, subject.tolerance
    batches = [traces.random_batch(cfg, i) for i in range(max(steps, 1))]
    with stage("training the reference"):
        wanted = traces.reference_trace(cfg, batches, steps)
    zero = distances.zero_gradients(cfg.model)
    devices = subject.devices
    options = traces.QUICK_COMPILE if devices[0].platform == "cpu" else None
    rounding: dict[str, float] = {}
    for name, on_mesh in subject.meshes.items():
        mesh = make_mesh(on_mesh.parallel, devices[: math.prod(axis_sizes(on_mesh.parallel))])
        with stage(f"training on {name}"):
            found = traces.mesh_trace(on_mesh, mesh, batches, steps, options)
        compared = distances.compare(found, wanted, tolerance, zero)
        if compared.gradient[0] > tolerance:
            with stage("evaluating the reference in float64"):
                rounding = rounding or distances.rounding_errors(wanted, batches[0], cfg, zero)
            compared = distances.compare(found, wanted, tolerance, zero, rounding)
        yield from compared.results(MESHES, name, steps)
    for name, why in subject.left_out.items():
        yield Result(MESHES, name, "training", not_run=why)
