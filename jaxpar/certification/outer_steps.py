"""The check of DiLoCo: its outer steps against numpy's, and inner steps of replicas on their own.

Source:   Douillard et al. 2023 (2311.08105), algorithm 1; Douillard et al. 2025 (2501.18512).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from jaxpar.certification import distances, traces
from jaxpar.certification.results import Result, Subject
from jaxpar.certification.traces import Arrays, compile_options
from jaxpar.certification.updates import ONE, first_mesh, mesh_of, on
from jaxpar.config import Config, ConfigError, present, replace
from jaxpar.sharding.batch import Batch
from jaxpar.step.diloco.outer import OuterSteps, make_exchange
from jaxpar.step.state import TrainState, init_state
from jaxpar.step.train_step import make_train_step

#: Two replicas, of two devices if a config can have them.
MESHES = ("replica=2,tensor=2", "replica=2")

#: Bound on errors where outer gradients are exchanged in bfloat16, and rounded twice.
ROUNDED = 2.0**-7


def outer_steps(subject: Subject) -> Iterator[Result]:
    """Compare outer steps, and an inner one, of the asked config's DiLoCo."""
    check, asked = "outer steps", subject.asked.diloco
    if asked is None:
        yield Result(check, "", "outer steps", not_run="the config has no diloco")
        return
    model = subject.small.model
    fragments = max(n for n in range(1, asked.fragments + 1) if model.num_layers % n == 0)
    if fragments > 1:  # two layers in each: every n-th layer, not a run of them
        model = model.with_layers(list(model.layers) * 2)
    # Fragments are due in turn: with 3 steps for each, all within the run.
    every = 3 * fragments
    d = dataclasses.replace(asked, fragments=fragments, every=every, overlap=min(asked.overlap, 2))
    small = replace(subject.small, model=model, diloco=d, **{"metrics.layers": "none"})
    optimizer = dataclasses.replace(small.optimizer, ema=None)
    train = dataclasses.replace(small.train, num_steps=100 * every, num_tokens=0, num_epochs=0.0)
    small = dataclasses.replace(small, optimizer=optimizer, train=train)
    try:
        name, cfg = first_mesh(small, MESHES, len(subject.devices))
    except ConfigError as error:
        yield Result(check, MESHES[-1], "outer steps", not_run=str(error))
        return
    for overlap in dict.fromkeys((0, d.overlap)):
        of = dataclasses.replace(cfg, diloco=dataclasses.replace(d, overlap=overlap))
        yield from _outer(name, of, subject)
    without = dataclasses.replace(cfg, diloco=dataclasses.replace(d, overlap=0))
    yield _inner(name, without, subject)


def _outer(name: str, cfg: Config, subject: Subject) -> Iterator[Result]:
    """Take the outer steps of two rounds, each from other weights of the replicas."""
    d, mesh = present(cfg.diloco), mesh_of(cfg, subject.devices)
    steps, state = OuterSteps(cfg, mesh), init_state(cfg, mesh)
    outer = {n: a.astype(np.float64) for n, a in traces.to_host(state.params).items()}
    momentum = {n: np.zeros_like(a) for n, a in outer.items()}
    errors, rng = dict[str, float](), np.random.default_rng(cfg.train.seed)
    spacing = d.every // d.fragments
    for turn in range(1, 2 * d.fragments + 1):
        state, own = _trained(state, rng)
        fragment = turn % d.fragments
        done = turn * spacing
        if d.overlap:
            begun, state = own, steps(done, state)
            exchange = make_exchange(cfg, mesh, fragment)  # train steps do a part each
            state = state.with_extra(diloco=exchange(state.extra["diloco"]))
            state, own = _trained(state, rng)
            state = steps(done + d.overlap, state)
        else:
            begun, state = own, steps(done, state)
        own = {n: a.copy() for n, a in own.items()}
        for path, rows in parts_of(fragment, cfg, outer).items():
            gradient = outer[path][rows] - begun[path].mean(axis=0)[rows]
            momentum[path][rows] = d.outer_momentum * momentum[path][rows] + gradient
            ahead = gradient + d.outer_momentum * momentum[path][rows]
            outer[path][rows] -= d.outer_learning_rate * ahead
            keep = d.mixing if d.overlap else 0.0
            for replica in own[path]:
                replica[rows] = keep * replica[rows] + (1 - keep) * outer[path][rows]
        kept = state.extra["diloco"]
        found = {"outer weights": state.params, "momentum": kept["momentum"]}
        found["weights of replicas"] = kept["weights"]
        for what, right in zip(found, (outer, momentum, own), strict=True):
            for path, a in traces.to_host(found[what]).items():
                size = np.abs(right[path]).max() or 1.0
                error = float(np.abs(a - right[path]).max() / size)
                errors[f"{what} of {path}"] = max(errors.get(f"{what} of {path}", 0.0), error)
    far, where = distances.worst(errors)
    bound = ROUNDED if d.outer_dtype == "bfloat16" else subject.tolerance
    what = f"outer steps of {d.fragments} fragments" + ", overlapped" * bool(d.overlap)
    yield Result("outer steps", name, what, far, bound, where=where)


def parts_of(fragment: int, cfg: Config, arrays: Arrays) -> dict[str, Any]:
    """Return the rows of each array that a fragment has: every n-th layer; the first has the
    embeddings, too, and the last what comes after the layers."""
    n, found = present(cfg.diloco).fragments, dict[str, Any]()
    for path in arrays:
        if "/" in path:
            found[path] = slice(fragment, None, n)
        elif fragment == (0 if path in ("embed", "positions") else n - 1):
            found[path] = slice(None)
    return found


def _trained(state: TrainState, rng: np.random.Generator) -> tuple[TrainState, Arrays]:
    """Return the state with random weights of each replica, and these, [R, ...] by path."""
    found = {}
    for path, a in traces.to_host(state.extra["diloco"]["weights"]).items():
        found[path] = a.astype(np.float64) + 0.02 * rng.standard_normal(a.shape)
    here = flax.traverse_util.flatten_dict(state.extra["diloco"]["weights"], sep="/")
    own = {n: jax.device_put(found[n].astype(np.float32), a.sharding) for n, a in here.items()}
    kept = state.extra["diloco"] | {"weights": flax.traverse_util.unflatten_dict(own, sep="/")}
    return state.with_extra(diloco=kept), found


def _inner(name: str, cfg: Config, subject: Subject) -> Result:
    """Compare the weights of replicas after a step with those of runs on their halves of it."""
    mesh, options = mesh_of(cfg, subject.devices), compile_options(subject.devices)
    batch = traces.random_batch(cfg)
    half = len(batch.tokens) // 2
    state, placed = init_state(cfg, mesh), traces.shard_batch(batch, cfg, mesh)
    step: Any = make_train_step(cfg, mesh, traces.max_segments(cfg))
    after, measured = step.lower(state, placed).compile(options)(state, placed)
    found = traces.to_host(after.extra["diloco"]["weights"])
    train = dataclasses.replace(cfg.train, global_batch_size=half)
    alone = on(dataclasses.replace(cfg, diloco=None, train=train), ONE, len(subject.devices))
    errors, ones = dict[str, float](), list[Any]()
    for replica in range(2):
        part = slice(replica * half, (replica + 1) * half)
        own: Batch = jax.tree.map(lambda a, part=part: a[part], batch)
        one = traces.mesh_trace(alone, mesh_of(alone, subject.devices), [own], 1, options)
        ones.append(one.metrics[0])
        for path, right in one.params.items():
            begun = one.init[path]
            errors[f"{path} of replica {replica}"] = distances.change_error(
                found[path][replica], right.astype(np.float64), begun, 1
            )
    tokens = [float(one["num_tokens"]) for one in ones]
    loss = np.average([float(one["loss"]) for one in ones], weights=tokens)
    errors["loss"] = abs(float(measured["loss"]) / loss - 1)
    errors["num_tokens"] = abs(float(measured["num_tokens"]) / sum(tokens) - 1)
    far, where = distances.worst(errors)
    bound = distances.update_tolerance(subject.tolerance)
    return Result("outer steps", name, "an inner step of each replica", far, bound, where=where)
