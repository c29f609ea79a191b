"""The checks of what initial weights are, and of what an update does to them, by `independent.py`.

A gradient is right on every mesh, or not, whatever an optimizer does with it. So an update is
checked alone: given gradients go through the update of the train step, with clipping, schedule,
decay and the moving average, and through the numpy versions.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpar.certification import distances, independent
from jaxpar.certification.independent import WeightKind
from jaxpar.certification.meshes import num_devices, parse_meshes, resolve_meshes, without_mesh
from jaxpar.certification.results import Result, Subject
from jaxpar.certification.traces import Arrays, compile_options, initial_params, to_host
from jaxpar.components.weight import Weight
from jaxpar.config import Config, ConfigError, present, replace, value_of
from jaxpar.config.lists import weight_schedules
from jaxpar.config.schema.optimizer import EmaConfig
from jaxpar.config.validate import resolve
from jaxpar.execution.decisions import execution_of
from jaxpar.model.parameters import specs_of, trainable_specs
from jaxpar.optimizer import schedules
from jaxpar.parallel.gradients import global_norm
from jaxpar.sharding.axes import AXES
from jaxpar.sharding.mesh import make_mesh, shardings
from jaxpar.sharding.params import ParamSpec, count, flat, join, partition_specs
from jaxpar.step.diloco.trainers import trainer_axes
from jaxpar.step.features import moving_average
from jaxpar.step.progress import TrainStep
from jaxpar.step.state import TrainState, init_state, state_shardings, state_specs
from jaxpar.step.train_step import updated

ONE = "data=1"


def on(cfg: Config, mesh: str, available: int) -> Config:
    """Return a config on a mesh. Raises:   ConfigError if it cannot run there."""
    parallel = parse_meshes([mesh], cfg.parallel)
    return resolve_meshes(cfg, parallel, available, given=True)[0][mesh]


def first_mesh(cfg: Config, names: Sequence[str], available: int) -> tuple[str, Config]:
    """Return the first mesh on which a config can run, and the config on it.

    Raises:   ConfigError if it can run on none.
    """
    for name in names[:-1]:
        try:
            return name, on(cfg, name, available)
        except ConfigError:
            continue
    return names[-1], on(cfg, names[-1], available)


def on_one_device(asked: Config) -> Config:
    """Return the config that a user gave, resolved for one device.

    Raises:   ConfigError if it cannot run there.
    """
    return resolve(without_mesh(asked), 1)


def mesh_of(cfg: Config, devices: Sequence[jax.Device]) -> Mesh:
    """Return the mesh of a resolved config on the first of the devices."""
    return make_mesh(cfg.parallel, devices[: num_devices(cfg.parallel)])


# ------------------------------------------------------------------------------ kinds of weights

#: Letters of `WeightKind` by logical axis, for weights of users' components.
_LETTERS = {
    **dict.fromkeys(("embed", "expert_embed"), "D"),
    **dict.fromkeys(("mlp", "whole_mlp"), "F"),
    **dict.fromkeys(("heads", "kv_heads"), "H"),
    "head_dim": "K",
}


def is_own(term: Any) -> bool:
    """Return whether a component is a user's."""
    return not type(term).__module__.startswith("jaxpar.")


def kinds_of(cfg: Config) -> dict[str, WeightKind]:
    """Return the kind of each weight by path: by its name, or as its component declares it, if
    that is a user's, or the name is not known."""
    own = dict[str, Weight]()
    for layer in cfg.model.layers:
        for term in (layer.mixer, layer.feed_forward):
            names = term.weights(cfg.model) if term else ()
            if term and (is_own(term) or not all(map(independent.is_known, names))):
                own |= {f"{layer.name}/{n}": w for n, w in term.declared(cfg.model).items()}
    found = {}
    for path, spec in flat(specs_of(cfg)).items():
        if path in own:
            found[path] = _declared(own[path], cfg)
        else:
            kind = independent.kind_of(path, len(spec.shape), cfg)
            found[path] = independent.with_sizes(kind, spec.shape)
    return found


def _declared(w: Weight, cfg: Config) -> WeightKind:
    m, cut = cfg.model, len(w.shape) - w.columns
    letters = [_LETTERS.get(axis, "R") for axis in w.axes]
    counts = sum(axis in ("experts", "spread_experts") for axis in w.axes)
    inputs, outputs = "".join(letters[counts:cut]), "".join(letters[cut:])
    std = m.init_std if w.std is None else w.std
    std /= math.sqrt(2 * m.base_depth) if w.to_stream else 1
    std /= math.sqrt(independent.width_ratio(inputs, m)) if w.columns else 1
    return WeightKind(
        inputs=inputs,
        outputs=outputs if w.columns else "",
        own_dims=len(w.shape) - counts,
        init=w.init,
        std=std,
        decays=w.decay,
        trained=w.trainable and cfg.lora is None,
        table=not w.columns and w.decay and len(w.shape) - counts > 1,
        readout=w.readout,
    )


# ------------------------------------------------------------------------------- initial weights

#: Bound on a mean, a standard deviation and a share of the values of one weight, in their own
#: standard deviations. A few hundred are looked at: one in a billion is beyond by chance.
DEVIATIONS = 7.0


def initial_weights(subject: Subject) -> Iterator[Result]:
    """Compare which weights decay, which are trained, and their initial distributions.

    The declarations of the asked config are compared exactly, the values of the small one by their
    moments.
    """
    check = "initial weights"
    specs, kinds = flat(specs_of(subject.asked)), kinds_of(subject.asked)
    wrong = [
        f"{path} {rule}" for path in specs for rule in declared_wrong(specs[path], kinds[path])
    ]
    yield Result(check, "", "declared", len(wrong), where=next(iter(wrong), ""))
    cfg = subject.small
    values = to_host(initial_params(specs_of(cfg), cfg.train.seed))
    off = {path: _deviations(values[path], kind) for path, kind in kinds_of(cfg).items()}
    far, path = distances.worst(off)
    what = "standard deviations from the distribution"
    yield Result(check, "", what, far, DEVIATIONS, where=path)
    twice = _repeated(values)
    yield Result(check, "", "values that repeat", len(twice), where=", ".join(twice))
    others = to_host(initial_params(specs_of(cfg), cfg.train.seed + 1))
    same = [n for n, a in values.items() if _is_random(a) and np.array_equal(a, others[n])]
    yield Result(check, "", "equal values for two seeds", len(same), where=", ".join(same))


def declared_wrong(spec: ParamSpec, kind: WeightKind) -> Iterator[str]:
    """Say what of the declaration of a weight is not that of its kind."""
    if spec.init != kind.init:
        yield f"begins with {spec.init}, not {kind.init}"
    elif kind.init == "normal" and not math.isclose(spec.std, kind.std, rel_tol=1e-6):
        yield f"has an initial deviation of {spec.std:.4g}, not {kind.std:.4g}"
    if spec.decay != kind.decays:
        yield f"has {'a' if spec.decay else 'no'} weight decay"
    if spec.trainable != kind.trained:
        yield f"is {'not ' * (not spec.trainable)}trained"


def _deviations(values: np.ndarray, kind: WeightKind) -> float:
    """Return how far a weight's values are from their distribution, in standard deviations."""
    x = values.astype(np.float64)
    if kind.init in ("ones", "zeros"):
        return 0.0 if (x == (kind.init == "ones")).all() else math.inf
    if kind.init == "normal":
        beyond = math.erfc(2 / math.sqrt(2))  # the share beyond two deviations: not truncated
        share = (np.mean(np.abs(x) > 2 * kind.std) - beyond) / math.sqrt(beyond * (1 - beyond))
        moments = x.mean() / kind.std, (x.std() / kind.std - 1) * math.sqrt(2), share
        return math.sqrt(x.size) * max(map(abs, moments))
    # Gu & Dao 2023 (2312.00752) and Mamba-2 (2405.21060): A from 1 to 16, steps of 0.001 to 0.1.
    if kind.init == "decay_rate":
        ends, uniform = (1.0, 16.0), np.exp(x)
    else:
        ends, uniform = (math.log(1e-3), math.log(0.1)), np.log(np.log1p(np.exp(x)))
    place = (uniform - ends[0]) / (ends[1] - ends[0])
    if not (place.min() >= -1e-4 and place.max() <= 1 + 1e-4):
        return math.inf
    return abs(place.mean() - 0.5) * math.sqrt(12 * x.size)


def _repeated(values: Arrays) -> list[str]:
    """Return the weights of which two layers, or two weights, have the same random values."""
    seen, twice = dict[bytes, str](), list[str]()
    for path, array in values.items():
        for row in array if "/" in path else [array]:
            if _is_random(row):
                found = seen.setdefault(row.tobytes(), path)
                twice += [path] if found is not path or row.tobytes() in twice else []
    return twice


def _is_random(a: np.ndarray) -> bool:
    return a.size > 3 and np.unique(a).size > 1


# -------------------------------------------------------------------------------------- schedule


def schedule(subject: Subject) -> Iterator[Result]:
    """Compare the learning rate at the start, around the warm-up's end, later, and after the end;
    and weights of losses that change.

    All are of the asked config.
    """
    yield from _loss_weights(subject.asked)
    asked = on_one_device(subject.asked)
    o, n = asked.optimizer, asked.train.num_steps
    if not isinstance(o.schedule, str):
        why = "the schedule is your own, and has no other version to compare with"
        yield Result("schedule", "", type(o.schedule).__name__, not_run=why)
        return
    first = independent.warm_up(o, n)
    near = {0, 1, first - 1, first, first + 1, first + 2, (first + n) // 2}
    near |= {n * k // 10 for k in range(1, 10)} | {n - 2, n - 1, n, n + 10}
    steps = sorted(step for step in near if step >= 0)
    wanted = np.array([independent.learning_rate(o, n, step) for step in steps])
    table = schedules.schedule_of(jnp.asarray(schedules.rate_table(o, n)))
    rates = {"learning rate": schedules.learning_rate(o, n), "learning rate in a table": table}
    for what, rate in rates.items():
        found = np.asarray([rate(jnp.int32(step)) for step in steps], np.float64)
        errors = np.abs(found - wanted) / o.learning_rate
        at = int(np.argmax(errors))
        where = f"step {steps[at]}: {found[at]:.6g}, not {wanted[at]:.6g}"
        yield Result("schedule", "", what, float(errors[at]), RATE, where=where)


def _loss_weights(asked: Config) -> Iterator[Result]:
    """Compare weights of losses between and beyond the points of their schedules."""
    for path in (weight_schedules.Z_LOSS, weight_schedules.MTP_LOSS):
        if not (points := value_of(asked, path)):
            continue
        at, weights = [one.step for one in points], [one.weight for one in points]
        steps = sorted({max(step + k, 0) for step in at for k in (-1, 0, 1, 3)})
        wanted = np.interp(steps, at, weights)
        found = np.array([weight_schedules.weight_at(asked, path, step) for step in steps])
        error = float(np.abs(found - wanted).max() / (max(weights) or 1.0))
        yield Result("schedule", "", path, error, RATE)


#: Bound on the error of a learning rate relative to the peak: float32 counts steps to 1e7.
RATE = 1e-6

# --------------------------------------------------------------------------------------- updates

#: Learning rate of the first compared update. Small rates would drown in the rounding of weights.
FIRST_RATE = 0.05

#: Steps of the warm-up.
WARM_UP = 2

#: Norms of given gradients, relative to clip_norm: those of the first and the last are clipped.
NORMS = (2.0, 0.3, 5.0)

#: Steps before the update that shows the moving average's own decay, not that of its start.
LATE = 1 << 24

#: An EMA decay for configs without.
DECAY = 0.99

#: Half the distance of two float32 numbers, relative to them.
HALF_ULP = 2.0**-24

#: Bound on the error of Muon's updates: five iterations enlarge the rounding error of a small
#: singular value, as the value itself, by 3.4 each.
OF_MUON = 3.4445**5 * HALF_ULP


def optimizer(subject: Subject) -> Iterator[Result]:
    """Compare weights, moments and moving average after one and three updates with numpy's."""
    rule = subject.asked.optimizer.name
    if not isinstance(rule, str):
        why = "the rule is your own, and has no other version: it was compared on meshes"
        yield Result("optimizer", "", type(rule).__name__, not_run=why)
        return
    cfg = on(of_updates(subject), ONE, len(subject.devices))
    mesh = mesh_of(cfg, subject.devices)
    kinds = {path: kind for path, kind in kinds_of(cfg).items() if kind.trained}
    grads = [random_gradients(kinds, cfg, i) for i in range(len(NORMS))]
    start, update = init_state(cfg, mesh), update_program(cfg, mesh)
    wanted = independent.Optimizer(cfg, kinds)
    begun = {n: a.astype(np.float64) for n, a in to_host(start.params).items()}
    weights = {n: begun[n] for n in kinds}
    average, state = dict(weights), start
    tolerance = max(subject.tolerance, OF_MUON if rule == "muon" else 0.0)

    def compared(what: str, found: Arrays, right: Arrays, size: Callable[[str], Any]) -> Result:
        if found.keys() != right.keys():
            names = f"only one side has {', '.join(sorted(found.keys() ^ right.keys()))}"
            return Result("optimizer", "", what, math.inf, tolerance, where=names)
        errors = {n: _mean_error(found[n], right[n], size(n)) for n in right}
        far, name = distances.worst(errors)
        return Result("optimizer", "", what, far, tolerance, where=name)

    for i, g in enumerate(grads):
        state = update(state, placed(g, cfg, mesh))
        weights = wanted.update(weights, {n: a.astype(np.float64) for n, a in g.items()})
        average = independent.averaged(average, weights, present(cfg.optimizer.ema).decay, i)
        if i not in (0, len(grads) - 1):
            continue
        after, found = f"after {i + 1} update{'s' * (i > 0)}", to_host(state.params)
        changes = lambda n: weights[n] - begun[n]  # noqa: B023, E731, called at once
        yield compared(f"weights {after}", {n: found[n] for n in kinds}, weights, changes)
        frozen = [n for n in begun if n not in kinds and not np.array_equal(found[n], begun[n])]
        if len(kinds) < len(begun):
            what = f"frozen weights {after}"
            yield Result("optimizer", "", what, len(frozen), where=", ".join(frozen))
        moments = moments_of(state.opt_state)
        for kind, right in wanted.moments.items():
            yield compared(f"{kind} {after}", moments.get(kind, {}), right, right.__getitem__)
        ema = to_host(state.extra["ema"])
        moved = lambda n: average[n] - begun[n]  # noqa: B023, E731
        yield compared(f"moving average {after}", ema, average, moved)
    # From an average of zeros, whose rounding is not that of the weights.
    zeros = jax.tree.map(jnp.zeros_like, state.extra["ema"])
    late = dataclasses.replace(state, step=jax.device_put(jnp.int32(LATE), state.step.sharding))
    found = update(late.with_extra(ema=zeros), placed(grads[0], cfg, mesh)).extra["ema"]
    weights = wanted.update(weights, {n: a.astype(np.float64) for n, a in grads[0].items()})
    decay, none = (
        present(cfg.optimizer.ema).decay,
        {n: np.zeros_like(w) for n, w in weights.items()},
    )
    average = independent.averaged(none, weights, decay, LATE)
    last = compared("moving average, late", to_host(found), average, average.__getitem__)
    # 1 - decay has the rounding error of the decay.
    yield dataclasses.replace(last, tolerance=tolerance + HALF_ULP / (1 - decay))


def of_updates(subject: Subject) -> Config:
    """Return the small config with the optimizer of the asked one: its rule, rates and decay.

    Moments are float32: `rounding.py` looks at others.
    """
    asked, small = subject.asked.optimizer, subject.small
    exact: dict[str, Any] = {n: getattr(small.optimizer, n) for n in _EXACT}
    exact |= dict.fromkeys(_HOW, False)
    ema: dict[str, Any] = {"ema": EmaConfig(decay=asked.ema.decay if asked.ema else DECAY)}
    # `schedule` compares long warm-ups, whose first rates have the rounding error of the peak.
    rate: dict[str, Any] = {"learning_rate": WARM_UP * FIRST_RATE, "schedule_by": "steps"}
    rate |= {"warmup_steps": WARM_UP, "warmup_fraction": 0.0}
    # An eps of a third of the gradients, beside which a factor of it shows.
    typical = (asked.clip_norm or 1.0) / math.sqrt(count(trainable_specs(small)))
    rate["eps"] = max(asked.eps, typical / 3)
    if asked.name == "sgd":  # its updates have the size of the gradients
        rate["learning_rate"] *= math.sqrt(count(trainable_specs(small))) / (asked.clip_norm or 1.0)
    o = dataclasses.replace(asked, **exact, **ema, **rate)
    steps = {"train.num_steps": on_one_device(subject.asked).train.num_steps}
    steps |= {"train.num_tokens": 0}
    return replace(small, optimizer=o, **steps, **{"train.num_epochs": 0.0})


_EXACT = ("first_moment_dtype", "second_moment_dtype", "muon_dtype")
_HOW = ("offload", "offload_masters", "schedule_as_input")


def random_gradients(kinds: Any, cfg: Config, index: int) -> Arrays:
    """Draw gradients whose sizes differ from element to element, float32, of the index's norm."""
    specs = flat(trainable_specs(cfg))
    rng = np.random.default_rng((cfg.train.seed, index))
    found = dict[str, np.ndarray]()
    for path in kinds:
        shape = specs[path].shape
        found[path] = rng.normal(size=shape) * 10 ** (rng.normal(size=shape) / 2)
    norm = math.sqrt(sum(float(np.sum(g * g)) for g in found.values()))
    limit = cfg.optimizer.clip_norm or 1.0
    # A clipped norm is at least 1: the step adds 1e-6 to it.
    size = NORMS[index] * limit if NORMS[index] < 1 else max(NORMS[index] * limit, 1.0)
    return {path: (g * (size / norm)).astype(np.float32) for path, g in found.items()}


def update_program(cfg: Config, mesh: Mesh) -> Callable[[TrainState, Any], TrainState]:
    """Return the compiled update of the train step: (state, gradients) -> state.

    It clips, updates the weights that are trained, and their moving average.
    """
    ex, specs = execution_of(cfg), state_specs(cfg)
    of_gradients = partition_specs(trainable_specs(cfg))

    def update(state: TrainState, grads: Any) -> TrainState:
        norm = global_norm(grads, trainer_axes(cfg, AXES))
        nothing: Any = None
        s = TrainStep(ex, state.step, state.params, nothing, state.extra, grads=grads)
        s, opt_state = updated(
            s.with_metrics(loss=jnp.float32(0), grad_norm=norm), state.opt_state, None
        )
        if cfg.optimizer.ema is not None:
            s = s.after(moving_average.FEATURE)
        return TrainState(state.step + 1, join(s.trainable, s.frozen), opt_state, s.extra)

    whole = jax.shard_map(update, mesh=mesh, in_specs=(specs, of_gradients), out_specs=specs)
    options = compile_options(list(mesh.devices.flat))
    return jax.jit(whole, out_shardings=state_shardings(cfg, mesh), compiler_options=options)


def placed(grads: Arrays, cfg: Config, mesh: Mesh) -> Any:
    """Put gradients on a mesh whose layers are in the model's order."""
    tree = flax.traverse_util.unflatten_dict(grads, sep="/")
    return jax.device_put(tree, shardings(mesh, partition_specs(trainable_specs(cfg))))


def moments_of(opt_state: Any) -> dict[str, Arrays]:
    """Return the arrays of an optax state by the name of the moment, and of the weight."""
    found: dict[str, Arrays] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        at = max((i for i, key in enumerate(path) if hasattr(key, "name")), default=-1)
        if at >= 0 and (names := [key.key for key in path[at + 1 :]]):
            found.setdefault(path[at].name, {})["/".join(names)] = np.asarray(leaf)
    return found


def _mean_error(found: np.ndarray, wanted: np.ndarray, size: np.ndarray) -> float:
    """Return the mean error relative to the mean of `size`. A mean: where two terms of an update
    cancel, its error is any multiple of it."""
    error, mean = np.abs(found.astype(np.float64) - wanted).mean(), np.abs(size).mean()
    return float(error / mean) if mean > 0 else (0.0 if error == 0 else math.inf)
