"""Traces the train step on many meshes, without compiling: a missing reduction is a type error.

`shard_map` checks over which axes of the mesh each value varies. A sum that is left out anywhere
between the loss and the new weights is then an error at trace time, whatever the sizes.
"""

import dataclasses
import heapq
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jaxpar.certification import small_config, traces
from jaxpar.certification.meshes import MOST_DEVICES, num_devices
from jaxpar.certification.results import Result, Subject
from jaxpar.components.experts import experts_in
from jaxpar.config import Config, ConfigError, default_of
from jaxpar.config.layout.fields import FIELDS
from jaxpar.config.validate import resolve
from jaxpar.prediction.layouts import legal_layouts, with_parallel
from jaxpar.runtime.stages import stage
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import abstract_state, state_shardings
from jaxpar.step.train_step import make_train_step

TRACING = "tracing"

#: What is checked.
TYPES = "types of the train step"

#: The most meshes to trace, and CPU seconds to trace them in: one to five each.
MOST, MOST_SECONDS = 60, 120.0

#: Options that `plan` keeps as they are, which change the program.
FURTHER = ("schedule", "layer_loop", "context", "expert_dispatch", "expert_tensor")

#: Values of FURTHER, and whether to list few layouts: each for the layouts of all its devices.
VARIANTS: tuple[tuple[int, bool, dict[str, Any]], ...] = (
    (MOST_DEVICES // 2, False, {"layer_loop": "unroll", "expert_dispatch": "rows"}),
    (MOST_DEVICES, True, {"layer_loop": "scan", "context": "ring"}),
    (MOST_DEVICES // 2, True, {"layer_loop": "unroll", "schedule": "zero_bubble"}),
    (MOST_DEVICES, True, {"layer_loop": "unroll", "schedule": "gpipe", "context": "ulysses"}),
    (MOST_DEVICES, True, {"layer_loop": "scan", "expert_tensor": 1, "expert_dispatch": "tokens"}),
)

type Options = tuple[tuple[str, Any], ...]


def trace_layouts(subject: Subject) -> Iterator[Result]:
    """Trace the train step on meshes that `plan` proposes, at most MOST, which have every pair of
    options that any of them has."""
    cfg, devices = subject.small, subject.devices
    if subject.given:
        yield Result(TRACING, "", TYPES, not_run="--mesh names the meshes")
        return
    with stage("listing layouts"):
        stages = lambda one: one.parallel.pipeline * one.parallel.virtual_stages  # noqa: E731
        layouts = sorted(_layouts(cfg, len(devices)), key=stages, reverse=True)
        # Of those with the same options, the last one has the fewest layers.
        chosen, uncovered = covering({options_of(one): one for one in layouts}, MOST)
    done, failed, start = 0, False, time.process_time()
    with stage("tracing layouts") as tracing:
        for on_mesh in map(with_fewest_layers, chosen):
            if time.process_time() - start > MOST_SECONDS:
                break
            name = describe(on_mesh)
            tracing.at(f"{done} of {len(chosen)}, {name}")
            wrong = _error(on_mesh, devices)
            done += 1
            if wrong:
                failed = True
                yield Result(TRACING, name, TYPES, 1.0, where=wrong)
    if done and not failed:
        yield Result(TRACING, "", TYPES, where=f"{done} of {len(layouts)} layouts")
    if done < len(chosen):
        why = f"{len(chosen) - done} layouts, after {MOST_SECONDS:.0f} CPU seconds"
        yield Result(TRACING, "", TYPES, not_run=why)
    if uncovered:
        why = f"{uncovered} pairs of options, to trace no more than {MOST} layouts"
        yield Result(TRACING, "", TYPES, not_run=why)


def _layouts(cfg: Config, available: int) -> Iterator[Config]:
    """Yield the layouts of the variants that a config has."""
    for number, few, values in VARIANTS:
        number = min(number, available)
        if not experts_in(cfg.model):
            values = {n: v for n, v in values.items() if not n.startswith("expert")}
        fixed = {"remat": cfg.parallel.remat} if few else {}
        yield from legal_layouts(with_parallel(cfg, **values), number, fixed, coarse=few).configs


#: Fields of which the type of a value depends only on whether they are 1.
COUNTS = (*FIELDS[:6], "num_microbatches", "virtual_stages")


def options_of(cfg: Config) -> Options:
    """Return the options of a layout: of sizes of axes and of counts, whether they are above 1."""
    p = cfg.parallel
    options = {name: getattr(p, name) for name in (*FIELDS, *FURTHER)}
    options |= {name: options[name] > 1 for name in COUNTS}
    if p.sequence == 1:
        del options["context"]
    if p.pipeline == 1:
        del options["schedule"]
    if p.expert == 1:
        del options["expert_dispatch"], options["expert_tensor"]
    return tuple(options.items())


def describe(cfg: Config) -> str:
    """Return a layout as `--mesh` takes it."""
    p, shown = cfg.parallel, options_of(cfg)
    default = lambda name: 1 if name in FIELDS[:6] else default_of(f"parallel.{name}")  # noqa: E731
    names = [n for n in (*FIELDS, *FURTHER) if n in dict(shown)]
    return ",".join(f"{n}={getattr(p, n)}" for n in names if getattr(p, n) != default(n))


def covering[T](items: dict[Options, T], most: int) -> tuple[list[T], int]:
    """Choose items that together have every pair of options that any has, greedily.

    Returns:  at most `most` items, and how many pairs they do not have.
    """
    pairs = {one: set(itertools.combinations(sorted(one, key=str), 2)) for one in items}
    missing = set[Any]().union(*pairs.values())
    # Gains only fall: the item whose gain is up to date and the largest is the best.
    queue = [(-len(of), i, one) for i, (one, of) in enumerate(pairs.items())]
    heapq.heapify(queue)
    chosen: list[T] = []
    while missing and queue and len(chosen) < most:
        _, i, one = heapq.heappop(queue)
        gain = len(pairs[one] & missing)
        if queue and -gain > queue[0][0]:
            heapq.heappush(queue, (-gain, i, one))
            continue
        if gain == 0:
            break
        missing -= pairs[one]
        chosen.append(items[one])
    return chosen, len(missing)


def with_fewest_layers(cfg: Config) -> Config:
    """Return a layout with one layer of each kind a stage, and two at least, which may differ."""
    m, p = cfg.model, cfg.parallel
    leading = [*dict.fromkeys(m.layers[: m.repetition.start])]
    period = small_config.pattern(m)
    for number in range(1, len(m.layers) // len(period)):
        layers = [*leading, *period * number]
        if len(layers) < max(2, p.pipeline * p.virtual_stages):
            continue
        try:
            fewer = dataclasses.replace(cfg, model=m.with_layers(layers))
            return resolve(fewer, num_devices(p), explain=False)
        except ConfigError:
            continue
    return cfg


def _error(cfg: Config, devices: Iterable[jax.Device]) -> str:
    """Trace the train step. Returns the first line of an error, "" without one."""
    mesh = make_mesh(cfg.parallel, list(devices)[: num_devices(cfg.parallel)])
    placed = lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)  # noqa: E731
    state = jax.tree.map(placed, abstract_state(cfg), state_shardings(cfg, mesh))
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    try:
        step: Any = make_train_step(cfg, mesh, traces.max_segments(cfg))
        step.trace(state, batch)
    except Exception as error:  # whatever it is, the step cannot run
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return ""
