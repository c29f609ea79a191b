"""Distances between two traces of training, and their tolerances."""

import functools
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import flax.traverse_util
import jax
import numpy as np

from jaxpar.certification import traces
from jaxpar.certification.results import Result
from jaxpar.certification.traces import Arrays, TrainingTrace
from jaxpar.components.attention import Attention
from jaxpar.components.component import Mixer
from jaxpar.config import Config, Model
from jaxpar.config.lists.weight_schedules import with_weights_of
from jaxpar.sharding.batch import Batch


def differing_arrays(found: Arrays, wanted: Arrays) -> list[str]:
    """Return the names of the arrays that differ in any bit."""
    assert found.keys() == wanted.keys(), sorted(set(found) ^ set(wanted))
    return [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()]


def zero_gradients(model: Model) -> frozenset[str]:
    """Return the parameters whose exact gradient is 0, so that computed ones are only rounding.

    Without rotary embeddings, a bias on keys adds the same to all scores of a query, and a softmax
    does not change. The number of the last layer scales the stream before the final norm, which
    undoes it, but for its eps; other layers of its stack have gradients.
    """
    bias = {layer.name for layer in model.layers if _shifts_scores(layer.mixer)}
    others = {layer.name for layer in model.layers if not _shifts_scores(layer.mixer)}
    found = {f"{name}/bk" for name in bias - others}
    last = model.layers[-1]
    if last.scaled and len(model.stacks[last.name]) == 1:
        found.add(f"{last.name}/layer_scale")
    return frozenset(found)


def _shifts_scores(a: Mixer | None) -> bool:
    if not isinstance(a, Attention) or not a.bias or a.rope is not None or a.qk_norm:
        return False
    return not a.own_methods and not a.sinks and a.softcap is None


def gradient_errors(found: Arrays, wanted: Arrays, zero: Container[str] = ()) -> dict[str, float]:
    """Compute each array's largest absolute error, relative to its largest absolute value.

    Args:     zero: arrays whose exact gradient is 0. Their errors are relative to the largest value
              of all arrays.
    """
    assert found.keys() == wanted.keys(), sorted(set(found) ^ set(wanted))
    sizes = {n: np.abs(w).max() for n, w in wanted.items()}
    sizes |= {n: max(sizes.values()) for n in sizes if n in zero}
    return {n: _ratio(np.abs(found[n] - w).max(), sizes[n]) for n, w in wanted.items()}


def update_errors(found: Arrays, wanted: Arrays, start: Arrays) -> dict[str, float]:
    """Compute each array's mean error after some steps, relative to its mean change since `start`.

    Means rather than maxima: Adam moves an element by about lr * g / |g|. If its gradient g is
    smaller than the rounding error of gradients, it moves by a full lr in either direction, on any
    mesh. Such elements are few; `update_tolerance` bounds their effect on the mean, and `steady`
    avoids them.
    """
    assert found.keys() == wanted.keys(), sorted(set(found) ^ set(wanted))
    mean = lambda a, b: np.abs(a.astype(np.float64) - b).mean()  # noqa: E731
    return {n: _ratio(mean(found[n], w), mean(w, start[n])) for n, w in wanted.items()}


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


def update_tolerance(tolerance: float) -> float:
    """Return the bound on `update_errors` for a bound on gradients; `certify.py` derives it."""
    return tolerance * (1 + math.log(1 / tolerance))


#: Bound on the error of a gradient, relative to what rounding does to the plain model's. A mesh and
#: the plain model are each off by about that, in either direction: by twice together. Each may be
#: off by twice as much as the samples. Measured were ratios of up to 1.6 (OLMo hybrid, Kimi K2).
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

    Args:     zero: `zero_gradients`. Their updates are not compared. rounding: `rounding_errors`,
              of which a gradient has 0 by default.
    """
    after = None
    if found.losses:
        params = {n: a for n, a in wanted.params.items() if n not in zero}
        after = update_errors({n: found.params[n] for n in params}, params, wanted.init)
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


# --------------------------------- How much rounding alone changes the gradients of the plain model
#
# A gradient is a sum over all tokens. Where its terms cancel, as they may for the gain of a norm,
# one rounding of a term can be more than `--tolerance` of the sum, and two correct meshes differ by
# that. So the plain model is evaluated in float64, which shows what float32 makes of each gradient.


#: Times that the weights are moved.
SAMPLES = 3

#: Half the distance of two float32 numbers, relative to them.
HALF_ULP = 2.0**-24


def rounding_errors(
    plain: traces.TrainingTrace, batch: Batch, cfg: Config, zero: Container[str] = ()
) -> dict[str, float]:
    """Measure the errors of the plain model's gradients that rounding explains, as in
    `gradient_errors`.

    The largest of: the error of the float32 gradient, and what it does to the exact one to move
    each weight by half an ulp, up or down at random. The second does not depend on float32 code,
    and a gradient of few elements that is right by chance does not hide it.

    Args:     plain: trained on `batch` first. zero: as for `gradient_errors`.
    Returns:  an error for each parameter.
    """
    rng = np.random.default_rng(cfg.train.seed)
    at_start = with_weights_of(cfg, 0)
    found = [plain.gradients]
    with jax.enable_x64(True):
        gradients = jax.jit(lambda params: traces.reference_gradients(params, batch, at_start)[1])

        def exact(weights: dict[str, np.ndarray]) -> traces.Arrays:
            return traces.to_host(gradients(flax.traverse_util.unflatten_dict(weights, sep="/")))

        weights = {name: a.astype(np.float64) for name, a in plain.init.items()}
        wanted = exact(weights)
        for _ in range(SAMPLES):
            move = lambda a: a * (1 + HALF_ULP * rng.choice([-1.0, 1.0], a.shape))  # noqa: E731
            found.append(exact({name: move(a) for name, a in weights.items()}))
    errors = [gradient_errors(one, wanted, zero) for one in found]
    return {name: max(error[name] for error in errors) for name in wanted}
