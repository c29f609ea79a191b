"""DiLoCo on every mesh: against plain trainers, one after another on one device.

The plain model of each replica trains on its rows with optax, and `optax.sgd` with Nesterov
momentum takes the outer steps.
"""

import functools
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.certification.small_config import steady
from jaxpar.certification.traces import max_segments
from jaxpar.config import Config, replace
from jaxpar.config.validate import resolve
from jaxpar.model.parameters import specs_of
from jaxpar.monitoring.hlo import collective_bytes
from jaxpar.optimizer.rules import make_optimizer
from jaxpar.sharding.batch import IGNORED
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.diloco.outer import OuterSteps, make_outer_step
from jaxpar.step.diloco.overlap import (
    applied,
    begun,
    due,
    programs_of_steps,
    same_program,
    under_way,
)
from jaxpar.step.diloco.sent import fragment_bytes, gradient_bytes, in_words
from jaxpar.step.state import TrainState, init_state
from jaxpar.step.train_step import make_train_step
from tests.slow import slow
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

#: The last step is an inner step after an outer one, of one fragment and of two.
STEPS = 7

BASE = steady(
    replace(
        TINY,
        **{
            "optimizer.clip_norm": 0.5,
            "diloco.every": 4,
            "parallel.replica": 2,
        },
    )
)
STREAMING = replace(BASE, **{"diloco.fragments": 2})
OVERLAPPED = replace(STREAMING, **{"diloco.overlap": 2})

type Arrays = dict[str, Any]


class PlainTrainers:
    """Replicas that train in a loop on one device. Weights by name."""

    def __init__(self, cfg: Config):
        self.cfg, d = cfg, cfg.diloco
        specs = specs_of(cfg)
        rule = make_optimizer(cfg.optimizer, cfg.train.num_steps, specs)
        self.rule = optax.chain(optax.clip_by_global_norm(cfg.optimizer.clip_norm), rule)
        self.outer_rule = optax.sgd(d.outer_learning_rate, d.outer_momentum, nesterov=True)
        self.outer: Arrays = flat(traces.initial_params(specs, cfg.train.seed))
        self.own = [self.outer] * cfg.parallel.replica
        self.moments = [self.rule.init(tree(own)) for own in self.own]
        of_fragments = (part(self.outer, i, d.fragments) for i in range(d.fragments))
        self.momentum = [self.outer_rule.init(weights) for weights in of_fragments]
        self.inner = jax.jit(self.inner_step)
        self.sent: dict[int, tuple[int, Arrays]] = {}  # by the step after which they are applied

    def inner_step(self, params, opt_state, batch):
        loss, grads = traces.reference_gradients(params, batch, self.cfg)
        updates, opt_state = self.rule.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    def step(self, batch) -> float:
        """Take an inner step of each replica on its rows. Returns the mean loss over tokens."""
        n = len(self.own)
        rows, total, count = self.cfg.train.global_batch_size // n, 0.0, 0
        for r in range(n):
            own = jax.tree.map(lambda a, r=r: a[r * rows : (r + 1) * rows], batch)
            loss, params, self.moments[r] = self.inner(tree(self.own[r]), self.moments[r], own)
            self.own[r], labeled = flat(params), int(np.sum(own.labels != IGNORED))
            total, count = total + float(loss) * labeled, count + labeled
        return total / count

    def outer_steps(self, done: int) -> None:
        """Take the outer steps that are due after a step, or send their gradients."""
        overlap, last = self.cfg.diloco.overlap, self.cfg.train.num_steps
        if done in self.sent:
            self.apply(*self.sent.pop(done), keep=self.cfg.diloco.mixing)
        for i in due(done, self.cfg):
            if not overlap or done == last:
                self.apply(i, self.gradient(i), keep=0.0)
            elif done + overlap < last:
                self.sent[done + overlap] = i, self.gradient(i)

    def gradient(self, i: int) -> Arrays:
        """The outer gradient of a fragment."""
        n = self.cfg.diloco.fragments
        parts = [part(own, i, n) for own in self.own]
        outer = part(self.outer, i, n)
        return {k: w - sum(own[k] for own in parts) / len(parts) for k, w in outer.items()}

    def apply(self, i: int, gradient: Arrays, keep: float) -> None:
        """Take the outer step of a fragment. Replicas keep a share of their own weights."""
        n, before = self.cfg.diloco.fragments, part(self.outer, i, self.cfg.diloco.fragments)
        updates, self.momentum[i] = self.outer_rule.update(gradient, self.momentum[i], before)
        after = optax.apply_updates(before, updates)
        self.outer = with_part(self.outer, after, i, n)
        for r, own in enumerate(self.own):
            mixed = {k: keep * w + (1 - keep) * after[k] for k, w in part(own, i, n).items()}
            self.own[r] = with_part(own, mixed, i, n)

    @property
    def all_momentum(self) -> Arrays:
        """The momentum of all fragments."""
        found = self.outer
        for i, state in enumerate(self.momentum):
            found = with_part(found, state[0].trace, i, len(self.momentum))
        return found


def tree(weights: Arrays) -> Any:
    return flax.traverse_util.unflatten_dict(weights, sep="/")


def part(weights: Arrays, i: int, n: int) -> Arrays:
    """The weights of fragment i of n: every n-th layer, embeddings first and the head last."""
    layers = {k: w[i::n] for k, w in weights.items() if k.startswith("layers/")}
    first = {k: w for k, w in weights.items() if k == "embed" and i == 0}
    last = {k: w for k, w in weights.items() if k in ("head", "final_norm") and i == n - 1}
    return layers | first | last


def with_part(weights: Arrays, new: Arrays, i: int, n: int) -> Arrays:
    """The weights with those of a fragment in their places."""
    put = lambda k, w: w.at[i::n].set(new[k]) if k.startswith("layers/") else new[k]  # noqa: E731
    return {k: put(k, jnp.asarray(w)) if k in new else w for k, w in weights.items()}


@functools.cache
def batches(cfg: Config, steps: int = STEPS) -> list:
    return [traces.random_batch(cfg, i) for i in range(steps)]


@functools.cache
def wanted(cfg: Config) -> tuple[list[float], PlainTrainers]:
    """The losses of plain trainers, and what they have after the last step."""
    trainers, losses = PlainTrainers(cfg), []
    for done, batch in enumerate(batches(cfg), start=1):
        losses.append(trainers.step(batch))
        trainers.outer_steps(done)
    return losses, trainers


def on_mesh(cfg: Config, text: str, devices: list) -> tuple[Config, Any]:
    """The config on a mesh of two replicas, and that mesh."""
    item = ",".join(["replica=2", *text.split()])
    parallel = parse_meshes([item], cfg.parallel)[item]
    size = int(np.prod(axis_sizes(parallel)))
    return resolve(replace(cfg, parallel=parallel), size), make_mesh(parallel, devices[:size])


def trained(cfg: Config, mesh, given: list) -> tuple[list[float], TrainState]:
    state, losses = init_state(cfg, mesh), []
    steps = {
        fragment: make_train_step(cfg, mesh, max_segments(cfg), fragment=fragment)
        for fragment in programs_of_steps(cfg)
    }
    outer = OuterSteps(cfg, mesh)
    for done, batch in enumerate(given, start=1):
        fragment = under_way(done - 1, cfg)
        step = steps[None if fragment is None else same_program(cfg, fragment)]
        state, metrics = step(state, traces.shard_batch(batch, cfg, mesh))
        state = outer(done, state)
        losses.append(float(metrics["loss"]))
    return losses, state


@pytest.mark.parametrize(
    ("cfg", "mesh"),
    [
        # The last step ends what is under way.
        slow(replace(OVERLAPPED, **{"train.num_steps": STEPS}), "data=2"),
        slow(STREAMING, "data=2"),
        slow(STREAMING, "data=2,tensor=2"),
        (BASE, ""),
        slow(BASE, "data=2,tensor=2"),
        slow(STREAMING, "data=2,zero=1"),
        slow(STREAMING, "data=2,sequence=2,zero=2"),
        slow(replace(STREAMING, **{"model.num_layers": 4}), "pipeline=2,data=2,num_microbatches=2"),
        slow(replace(STREAMING, **{"optimizer.name": "adafactor"}), "data=2,tensor=2"),
        # A rate at which norms change by more than their rounding.
        slow(replace(BASE, **{"optimizer.name": "sgd", "optimizer.learning_rate": 1.0}), "data=2"),
        slow(STREAMING, "tensor=2,num_microbatches=2,layer_loop=unroll,zero=1"),
        slow(OVERLAPPED, "data=2"),
        slow(OVERLAPPED, "data=2,tensor=2,zero=1"),
        slow(replace(OVERLAPPED, **{"diloco.overlap": 1, "diloco.mixing": 0.0}), "sequence=2"),
        slow(replace(BASE, **{"diloco.overlap": 3, "diloco.mixing": 0.25}), "data=2,zero=2"),
        slow(replace(OVERLAPPED, **{"model.num_layers": 4}), "pipeline=2,num_microbatches=2"),
    ],
)
def test_plain_trainers(cfg, mesh, devices):
    losses, plain = wanted(cfg)
    start = traces.to_host(traces.initial_params(specs_of(cfg), cfg.train.seed))
    found_losses, state = trained(*on_mesh(cfg, mesh, devices), batches(cfg))
    np.testing.assert_allclose(found_losses, losses, rtol=TOLERANCE)
    host = lambda leaves: {k: np.asarray(w) for k, w in leaves.items()}  # noqa: E731
    zero = {k: np.zeros_like(w) for k, w in start.items()}
    of_replica = lambda r: {k: w[r] for k, w in flat(state.extra["diloco"]["weights"]).items()}  # noqa: E731
    # Adafactor divides by the root of a mean without an eps, so `steady` does not help it.
    without_eps = cfg.optimizer.name == "adafactor"
    allowed = distances.update_tolerance(TOLERANCE) if without_eps else TOLERANCE
    pairs = [
        (flat(state.params), plain.outer, start),
        (flat(state.extra["diloco"]["momentum"]), plain.all_momentum, zero),
        *((of_replica(r), plain.own[r], start) for r in range(2)),
    ]
    for found, right, before in pairs:
        errors = distances.update_errors(host(found), host(right), before)
        assert distances.worst(errors)[0] <= allowed, distances.worst(errors)
    apart = host(of_replica(0))["layers/wq"] - host(of_replica(1))["layers/wq"]
    if cfg.train.num_steps == STEPS:  # the end joins them
        assert not apart.any()
    else:
        assert np.abs(apart).max() > 1e-3  # replicas have trained on their own since


@pytest.mark.slow
def test_replicas_with_the_same_rows_are_one_trainer(devices):
    """Their mean is each of them: an outer step at rate 1 without momentum changes nothing."""
    fields = {"diloco.outer_learning_rate": 1.0, "diloco.outer_momentum": 0.0}
    rows = BASE.train.global_batch_size // 2
    own = [jax.tree.map(lambda a: a[:rows], batch) for batch in batches(BASE)]
    twice = [jax.tree.map(lambda a: np.concatenate([a, a]), batch) for batch in own]
    found_losses, found = trained(*on_mesh(replace(BASE, **fields), "", devices), twice)
    one = {"parallel.replica": 1, "parallel.data": 1, "train.global_batch_size": rows}
    alone = resolve(replace(BASE, diloco=None, **one), 1)
    losses, wanted = trained(alone, make_mesh(alone.parallel, devices[:1]), own)
    np.testing.assert_allclose(found_losses, losses, rtol=TOLERANCE)
    start = traces.to_host(traces.initial_params(specs_of(BASE), BASE.train.seed))
    for r in range(2):
        weights = {k: np.asarray(w)[r] for k, w in flat(found.extra["diloco"]["weights"]).items()}
        errors = distances.update_errors(weights, traces.to_host(wanted.params), start)
        assert distances.worst(errors)[0] <= TOLERANCE, distances.worst(errors)


def test_when_fragments_are_due():
    cfg = replace(STREAMING, **{"train.num_steps": 10})
    assert {s: due(s, cfg) for s in range(1, 11) if due(s, cfg)} == {
        2: [1],
        4: [0],
        6: [1],
        8: [0],
        10: [0, 1],  # the last step: nothing is lost
    }
    assert not any(due(s, replace(cfg, diloco=None)) for s in range(11))


def test_when_an_overlap_begins_and_ends():
    fields = {"train.num_steps": 13, "diloco.every": 6, "diloco.overlap": 2}
    cfg = replace(STREAMING, **fields)
    at = lambda when: {s: i for s in range(14) if (i := when(s, cfg)) is not None}  # noqa: E731
    assert at(begun) == {3: 1, 6: 0, 9: 1}  # 12 would end after the last step
    assert at(under_way) == {3: 1, 4: 1, 6: 0, 7: 0, 9: 1, 10: 1}
    assert at(applied) == {5: 1, 8: 0, 11: 1}
    full = replace(cfg, **{"diloco.overlap": 3})
    assert [s for s in range(14) if under_way(s, full) is None] == [0, 1, 2, 12, 13]
    assert applied(6, full) == 1 and begun(6, full) == 0
    one_at_once = replace(cfg, **{"diloco.overlap": 0})
    assert not any(f(s, one_at_once) for f in (begun, under_way, applied) for s in range(14))


def sent(program: Any, *args: Any) -> dict[str, Any]:
    """What a compiled program sends on the mesh of `args`, by kind."""
    found = collective_bytes(program.lower(*args).compile().as_text())
    assert not found.unknown
    return found.kinds


@pytest.mark.slow
def test_an_inner_step_sends_its_metrics_alone(devices):
    """Over replicas, which are the whole mesh here."""
    cfg, mesh = on_mesh(STREAMING, "", devices)
    started = init_state(cfg, mesh), traces.shard_batch(batches(cfg)[0], cfg, mesh)
    kinds = sent(make_train_step(cfg, mesh, max_segments(cfg)), *started)
    assert kinds == {"all-gather": {"count": 1, "bytes": 4 * 6}}


@pytest.mark.slow
def test_what_replicas_exchange(devices):
    cfg, mesh = on_mesh(STREAMING, "", devices)
    state = init_state(cfg, mesh)
    for dtype in ("float32", "bfloat16"):
        of = replace(cfg, **{"diloco.outer_dtype": dtype})
        for i, wanted_bytes in enumerate(fragment_bytes(of)):
            kinds = sent(make_outer_step(of, mesh, i), state.params, state.extra["diloco"])
            assert sum(kind["bytes"] for kind in kinds.values()) == wanted_bytes
    plain = replace(cfg, diloco=None)
    started = init_state(plain, mesh), traces.shard_batch(batches(cfg)[0], cfg, mesh)
    each_step = sent(make_train_step(plain, mesh, max_segments(plain)), *started)
    assert 0 <= each_step["all-reduce"]["bytes"] - gradient_bytes(plain) <= 16  # and the loss


@pytest.mark.slow
def test_a_step_sends_its_part_of_an_exchange(devices):
    cfg, mesh = on_mesh(OVERLAPPED, "", devices)
    started = init_state(cfg, mesh), traces.shard_batch(batches(cfg)[0], cfg, mesh)
    for i in range(2):
        step = make_train_step(cfg, mesh, max_segments(cfg), fragment=i)
        kinds = sent(step, *started)
        sizes = [w.size for w in part(flat(started[0].params), i, 2).values()]
        assert kinds["all-reduce"]["bytes"] == sum(4 * -(-size // 2) for size in sizes)
        assert kinds["all-gather"] == {"count": 1, "bytes": 4 * 6}  # metrics


def test_what_a_run_says_of_an_overlap():
    cfg = replace(OVERLAPPED, **{"diloco.every": 20, "parallel.data": 1})
    largest = max(fragment_bytes(cfg)) / 2 / 1e6
    said = f"every 20 steps in 2 fragments beside 2 inner steps, at most {largest:.3g} MB in a step"
    assert said in in_words(cfg)


def test_bfloat16_rounds_twice(devices):
    """What replicas send, and their mean: as numpy rounds them."""
    cfg, mesh = on_mesh(replace(BASE, **{"diloco.outer_dtype": "bfloat16"}), "", devices)
    state = init_state(cfg, mesh)
    noise = np.random.default_rng(0).standard_normal((2, *state.params["head"].shape))
    start = np.asarray(state.params["head"])
    own = (start + 1e-2 * noise).astype(np.float32)
    placed = jax.device_put(own, state.extra["diloco"]["weights"]["head"].sharding)
    weights = state.extra["diloco"]["weights"] | {"head": placed}
    after, _ = make_outer_step(cfg, mesh, 0)(
        state.params, state.extra["diloco"] | {"weights": weights}
    )
    rounded = lambda x: np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float32)  # noqa: E731
    gradient = rounded(np.mean(rounded(start - own), axis=0))
    np.testing.assert_allclose(after["head"], start - 0.7 * 1.9 * gradient, atol=1e-6)
    assert np.abs(gradient - np.mean(start - own, axis=0)).max() > 1e-6
