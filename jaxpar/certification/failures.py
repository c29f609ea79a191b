"""Where a mesh goes wrong first, and the smallest mesh that shows it."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import num_devices, parse_meshes, simpler
from jaxpar.certification.results import Subject
from jaxpar.certification.traces import Arrays, TrainingTrace
from jaxpar.config import Config, ConfigError, Model, replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.step.features import own_probes
from jaxpar.step.features.layer_metrics import rms
from jaxpar.step.features.own_probes import Probe
from jaxpar.step.train_step import make_gradient_step

#: The points of a layer at which a forward is looked at, in their order, and that after the layers.
POINTS = ("mixer_input", "mixer_output", "feed_forward_input", "feed_forward_output", "residual")
PROBES = tuple(
    Probe(name=f"rms_of_{point}", point=point, reduce="mean", value=rms)
    for point in (*POINTS, "head")
)

#: The most meshes to train for the smallest one that fails.
MOST_TRIES = 10


def first_wrong(
    cfg: Config, subject: Subject, batch: Batch, found: TrainingTrace, wanted: TrainingTrace
) -> str:
    """Return the first wrong tensor with its layer and direction.

    Args:     cfg: on the mesh, resolved. found, wanted: of the mesh, and of the plain model.
    """
    t = subject.tolerance
    if distances.differing_arrays(found.init, wanted.init):
        return "wrong before the first step"
    error = abs(found.loss - wanted.loss) / abs(wanted.loss)
    if not error <= t:
        return f"forward: {_first_of_forward(cfg, subject, batch, wanted, t)}"
    for name, layer, error in _backward(found.gradients, wanted.gradients, cfg.model):
        if not error <= t:
            at = "" if layer is None else f" of layer {layer}"
            return f"backward: {name}{at}, off by {error:.1e}; the forward is right"
    return "after the backward: loss and gradients are right"


def _first_of_forward(
    cfg: Config, subject: Subject, batch: Batch, wanted: TrainingTrace, tolerance: float
) -> str:
    """Measure each layer on the mesh and with the plain model, and name the first that differs."""
    probed = replace(cfg, **{"train.probes": PROBES, "metrics.layers": "none"})
    params = flax.traverse_util.unflatten_dict(wanted.init, sep="/")
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
        right = jax.jit(lambda p: own_probes.plain(p, batch, probed, PROBES))(exact)
        right = traces.to_host(right)
    mesh = make_mesh(cfg.parallel, subject.devices[: math.prod(axis_sizes(cfg.parallel))])
    state = traces.init_state(probed, mesh)
    step = make_gradient_step(probed, mesh, traces.max_segments(probed))
    here, _ = step(state.params, traces.shard_batch(batch, probed, mesh))
    for layer in range(cfg.model.num_layers):
        for probe in PROBES[:-1]:
            one, other = (np.asarray(of[probe.metric])[layer] for of in (here, right))
            if np.isfinite(other) and not abs(one - other) <= tolerance * abs(other):
                return f"{probe.point} of layer {layer}"
    head = PROBES[-1].metric
    if not abs(here[head] - right[head]) <= tolerance * abs(right[head]):
        return "the input of the head"
    return "the head or the loss; the layers are right"


def _backward(
    found: Arrays, wanted: Arrays, model: Model
) -> Iterator[tuple[str, int | None, float]]:
    """Yield (parameter, layer, error) in the order of the backward, the worst first within each of
    its steps: the head and the last norm, the layers from the last on, the embedding."""
    stacks = set(model.stacks)
    top = [n for n in wanted if n.partition("/")[0] not in stacks]
    first = ("embed", "positions")
    errors = distances.gradient_errors(found, wanted)

    def worst(names: list[str], of: Callable[[str], float]) -> Iterator[tuple[str, float]]:
        yield from sorted(((n, of(n)) for n in names), key=lambda pair: -pair[1])

    yield from ((n, None, e) for n, e in worst([n for n in top if n not in first], errors.get))  # type: ignore[arg-type]
    for layer, (stack, i) in reversed(list(enumerate(model.places))):
        names = [n for n in wanted if n.startswith(f"{stack}/")]

        def of_row(name: str, i: int = i) -> float:
            size = np.abs(wanted[name]).max() or 1.0
            return float(np.abs(found[name][i] - wanted[name][i]).max() / size)

        yield from ((n, layer, e) for n, e in worst(names, of_row))
    yield from ((n, None, errors[n]) for n in first if n in errors)


def smallest(name: str, subject: Subject, fails: Callable[[str, Config], bool]) -> str:
    """Drop options of a mesh one at a time while it still fails, and say which remain.

    Args:     name: of the mesh that fails. fails: (name, resolved config) -> whether it does.
    """
    p = dataclasses.replace(subject.small.parallel, num_microbatches=1, row_groups=1)
    tried, right = {name}, list[str]()
    again = True
    while again:
        again = False
        for one in simpler(name):
            if one in tried or len(tried) > MOST_TRIES:
                continue
            tried.add(one)
            if (cfg := _resolved(one, subject, p)) is None:
                continue
            if fails(one, cfg):
                name, again = one, True
                break
            right.append(one)
    passes = f"; right on {', '.join(right[-3:])}" if right else ""
    return f"smallest mesh that shows it: {name}{passes}"


def _resolved(name: str, subject: Subject, p: Any) -> Config | None:
    try:
        mesh = parse_meshes([name], p)[name]
        on_mesh = dataclasses.replace(subject.small, parallel=mesh)
        return resolve(on_mesh, num_devices(mesh), explain=False)
    except ConfigError:
        return None
