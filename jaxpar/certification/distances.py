"""Distances between two traces of training, and their tolerances."""

import functools
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from jaxpar.certification.results import Result
from jaxpar.certification.traces import Arrays, TrainingTrace
from jaxpar.components.attention import Attention
from jaxpar.components.component import Mixer
from jaxpar.config import Model
from jaxpar.config.schema.optimizer import AVERAGED


def differing_arrays(found: Arrays, wanted: Arrays) -> list[str]:
    """Return the names of the arrays that differ in any bit."""
    assert found.keys() == wanted.keys(), sorted(set(found) ^ set(wanted))
    return [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()]


#: After the name of an array, in `zero_gradients`: its last row alone.
LAST = "[-1]"


def zero_gradients(model: Model) -> frozenset[str]:
    """Return the parameters whose exact gradient is 0, so that computed ones are only rounding.

    Without rotary embeddings, a bias on keys adds the same to all scores of a query, and a softmax
    does not change. The number of the last layer scales the stream before the final norm, which
    undoes it, but for its eps; other layers of its stack have gradients.

    Returns:  names of arrays, and with LAST of those whose last row alone has none.
    """
    bias = {layer.name for layer in model.layers if _shifts_scores(layer.mixer)}
    others = {layer.name for layer in model.layers if not _shifts_scores(layer.mixer)}
    found = {f"{name}/bk" for name in bias - others}
    last = model.layers[-1]
    if last.scaled:
        name = f"{last.name}/layer_scale"
        found.add(name if len(model.stacks[last.name]) == 1 else name + LAST)
    return frozenset(found)


def _shifts_scores(a: Mixer | None) -> bool:
    if not isinstance(a, Attention) or not a.bias or a.rope is not None or a.qk_norm:
        return False
    return not a.own_methods and not a.sinks and a.softcap is None


def _trained(name: str, a: np.ndarray, zero: Container[str]) -> np.ndarray:
    """Return the rows of an array whose gradient is not 0."""
    return a[:-1] if name + LAST in zero else a


def gradient_errors(found: Arrays, wanted: Arrays, zero: Container[str] = ()) -> dict[str, float]:
    """Compute each array's largest absolute error, relative to its largest absolute value.

    Args:     zero: arrays whose exact gradient is 0. Their errors are relative to the largest value
              of all arrays.
    """
    assert found.keys() == wanted.keys(), sorted(set(found) ^ set(wanted))
    sizes = {n: np.abs(w).max() for n, w in wanted.items()}
    sizes |= {n: max(sizes.values()) for n in sizes if n in zero}
    return {n: _ratio(np.abs(found[n] - w).max(), sizes[n]) for n, w in wanted.items()}


def update_errors(
    found: Arrays, wanted: Arrays, start: Arrays, updates: int = 0
) -> dict[str, float]:
    """Compute each array's mean error after some steps, relative to its mean change since `start`.

    Means rather than maxima: Adam moves an element by about lr * g / |g|. If its gradient g is
    smaller than the rounding error of gradients, it moves by a full lr in either direction, on any
    mesh. Such elements are few; `update_tolerance` bounds their effect on the mean, and `steady`
    avoids them.

    Args:     updates: how often an array was stored in float32 since `start`, rounded each time.
    """
    assert found.keys() == wanted.keys(), sorted(set(found) ^ set(wanted))
    return {n: change_error(found[n], w, start[n], updates) for n, w in wanted.items()}


def change_error(
    found: np.ndarray, wanted: np.ndarray, start: np.ndarray, updates: int = 0
) -> float:
    """`update_errors` of an array."""
    rounding = updates * HALF_ULP * np.abs(wanted)
    error = np.maximum(np.abs(found.astype(np.float64) - wanted) - rounding, 0.0)
    return _ratio(error.mean(), np.abs(wanted - start.astype(np.float64)).mean())


def probe_errors(found: Arrays, wanted: Arrays) -> dict[str, float]:
    """Compute each probe's largest error in any layer, relative to its largest value. Layers
    without its point, which have no number, must be the same."""
    errors = {}
    for name, values in wanted.items():
        here, there = np.isfinite(found[name]), np.isfinite(values)
        if not (np.array_equal(here, there) and there.any()):
            errors[name] = np.inf
        else:
            error = np.abs(found[name] - values)[there].max()
            errors[name] = _ratio(error, np.abs(values[there]).max())
    return errors


def loss_error(found: TrainingTrace, wanted: TrainingTrace) -> float:
    """Compute the largest relative error of all losses."""
    pairs = zip([found.loss, *found.losses], [wanted.loss, *wanted.losses], strict=True)
    return max(_ratio(abs(a - b), abs(b)) for a, b in pairs)


def worst(errors: dict[str, float]) -> tuple[float, str]:
    """Return the largest error and its name."""
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def _ratio(error: float, size: float) -> float:
    """error / size; infinite if that is not finite, so that it exceeds any tolerance."""
    if error == 0:
        return 0.0
    ratio = float(error) / float(size) if size > 0 else np.inf
    return ratio if np.isfinite(ratio) else np.inf


@dataclass(frozen=True)
class Comparison:
    """The distance of a trace from the reference."""

    tolerance: float
    differing: list[str]
    """Initial parameters that differ in any bit."""
    loss: float
    """Largest relative error of any loss."""
    gradient: tuple[float, str]
    """Worst of `gradient_errors`, and the parameter."""
    update: tuple[float, str] | None
    """Worst of `update_errors`; None without steps."""
    probe: tuple[float, str] | None = None
    """Worst of `probe_errors`; None without probes."""
    allowed: float = 0.0
    """Bound on that gradient, if it is more than the tolerance (`gradient_tolerance`)."""

    @property
    def gradient_bound(self) -> float:
        """Bound on the error of the worst gradient."""
        return max(self.tolerance, self.allowed)

    def results(self, check: str, mesh: str, steps: int) -> Iterator[Result]:
        """Yield a result for each quantity."""
        t, result = self.tolerance, functools.partial(Result, check, mesh)
        differing = ", ".join(self.differing)
        yield result("initial values", len(self.differing), where=differing)
        yield result("loss", self.loss, t)
        error, name = self.gradient
        yield result("gradient", error, self.gradient_bound, where=name)
        if self.probe:
            error, name = self.probe
            yield result("probe", error, t, where=name)
        if self.update:
            error, name = self.update
            yield result(f"weights after {steps} steps", error, update_tolerance(t), where=name)

    def mismatches(self) -> list[str]:
        """Describe everything that exceeds the tolerance."""
        return [str(result) for result in self.results("", "", 0) if not result.passed]


#: Half the distance of two float32 numbers, relative to them.
HALF_ULP = 2.0**-24

#: Metrics that depend on the mesh, and are compared with nothing.
OF_MESH = ("further_rounds",)


def metric_errors(found: Arrays, wanted: Arrays) -> dict[str, float]:
    """Compute each metric's largest error in any layer, relative to its largest value."""
    return {name: _relative(found[name], w) for name, w in wanted.items()}


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest error, relative to the largest value; NaNs must be in the same places."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    if found.shape != wanted.shape or not np.array_equal(np.isnan(found), np.isnan(wanted)):
        return np.inf
    if np.isnan(wanted).all():
        return 0.0
    return _ratio(np.nanmax(np.abs(found - wanted)), np.nanmax(np.abs(wanted)))


def rank_metrics(rows: np.ndarray, ways: int) -> Arrays:
    """Compute the metrics of the devices that share experts.

    Args:     rows: [layers, E], tokens of each expert. ways: devices that share them.
    """
    share = rows / rows.sum(axis=1, keepdims=True)
    fullest = share.reshape(len(rows), ways, -1).sum(axis=2).max(axis=1) * ways
    return {"fullest_rank": fullest.max(), "fullest_rank_mean": fullest.mean()}


#: The parts of a state, as results name them.
PARTS = {"params": "weights", "opt_state": "moments", AVERAGED: "moving average"}


def state_errors(
    found: Arrays, wanted: Arrays, start: Arrays, updates: int, zero: Container[str] = ()
) -> dict[str, dict[str, float]]:
    """Compute each array's mean error in a state after some updates, by the part of the state.

    It is relative to the mean change since `start`, and of moments to their mean size.

    Args:     start: initial parameters. updates: their number. zero: `zero_gradients`, which are
              left out: their updates are arbitrary.
    """
    errors: dict[str, dict[str, float]] = {}
    for path, right in wanted.items():
        part, _, name = path.partition("/")
        of = next((n for n in start if path.endswith(f"/{n}")), "")
        if of in zero:
            continue
        here, before = found.get(path), start.get(name, np.zeros(right.shape))
        error = np.inf
        if here is not None and here.shape == right.shape:
            here, right, before = (_trained(of, a, zero) for a in (here, right, before))
            error = change_error(here, right, before, updates)
        errors.setdefault(PARTS.get(part, f"state of {part}"), {})[name] = error
    return errors


def further_results(
    check: str,
    mesh: str,
    found: TrainingTrace,
    wanted: TrainingTrace,
    tolerance: float,
    zero: Container[str] = (),
    same_bits: bool = True,
) -> Iterator[Result]:
    """Yield the results that `Comparison` does not have.

    Args:     zero: `zero_gradients`. same_bits: whether a program gives the same bits twice.
    """
    result, after = functools.partial(Result, check, mesh), update_tolerance(tolerance)
    every = list(zip(found.metrics, wanted.metrics, strict=True))
    first = metric_errors(*every[0])
    error, name = worst(first)
    yield result("metrics", error, tolerance, where=name)
    later = {
        f"{n} of step {i + 2}": e
        for i, pair in enumerate(every[1:])
        for n, e in metric_errors(*pair).items()
    }
    if later:
        error, name = worst(later)
        yield result("metrics of later steps", error, after, where=name)
    for updates, state in wanted.states.items():
        of_state = state_errors(found.states[updates], state, wanted.init, updates, zero)
        for part, errors in of_state.items():
            error, name = worst(errors)
            if part != "weights" or updates != len(found.losses):
                yield result(f"{part} after {updates} steps", error, after, where=name)
    if found.evaluated is not None and wanted.evaluated is not None:
        error = _ratio(abs(found.evaluated - wanted.evaluated), abs(wanted.evaluated))
        yield result("evaluation", error, tolerance)
    for what, pair in found.same.items():
        error, name = worst(metric_errors(*pair))
        yield result(what, error, 0.0 if same_bits else tolerance, where=name if error else "")


def update_tolerance(tolerance: float) -> float:
    """Return the bound on `update_errors` for a bound on gradients; `certify.py` derives it."""
    return tolerance * (1 + math.log(1 / tolerance))


#: Bound on the error of a gradient, relative to what it does to the exact one to round each weight
#: to float32. A mesh rounds more than the weights.
ROUNDINGS = 4.0

#: The most that rounding may explain, relative to the tolerance. Beyond it, as where a router
#: chooses another expert in float64, there is no telling it from a fault.
MOST_ROUNDING = 10.0


def gradient_tolerance(tolerance: float, rounding: float) -> float:
    """Return the bound on the error of a gradient that rounding changes by `rounding`."""
    return max(tolerance, min(ROUNDINGS * rounding, MOST_ROUNDING * tolerance))


def compare(
    found: TrainingTrace,
    wanted: TrainingTrace,
    tolerance: float,
    zero: Container[str] = (),
    rounding: Mapping[str, float] = MappingProxyType({}),
) -> Comparison:
    """Compare the trace of a mesh with that of the reference.

    Args:     zero: `zero_gradients`. Their updates are not compared. rounding: of the reference's
              gradients, which have 0 by default.
    """
    after = None
    if found.losses:
        every = found.params, wanted.params, wanted.init
        names = [n for n in wanted.params if n not in zero]
        here, right, start = ({n: _trained(n, of[n], zero) for n in names} for of in every)
        after = update_errors(here, right, start, len(found.losses))
    errors = gradient_errors(found.gradients, wanted.gradients, zero)
    bounds = {name: gradient_tolerance(tolerance, rounding.get(name, 0.0)) for name in errors}
    _, name = worst({name: error / bounds[name] for name, error in errors.items()})
    return Comparison(
        tolerance=tolerance,
        differing=differing_arrays(found.init, wanted.init),
        loss=loss_error(found, wanted),
        gradient=(errors[name], name),
        update=worst(after) if after else None,
        probe=worst(probe_errors(found.probes, wanted.probes)) if wanted.probes else None,
        allowed=bounds[name],
    )
