"""The checks of what rounds: small dtypes of matmuls, sums, gathers and moments.

Where both sides round, no tolerance tells a fault of 1% from rounding, except in the mean: rounding
makes as many numbers larger as smaller. So errors have a bound that follows from the dtype, and the
mean of the ratios of norms one of 1%.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from statistics import NormalDist
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.certification import distances, independent, traces
from jaxpar.certification.meshes import num_devices
from jaxpar.certification.results import Result, Subject
from jaxpar.certification.traces import Arrays, compile_options
from jaxpar.certification.updates import (
    DECAY,
    LATE,
    ONE,
    first_mesh,
    kinds_of,
    mesh_of,
    moments_of,
    of_updates,
    on,
    placed,
    random_gradients,
    update_program,
)
from jaxpar.components.experts import Experts, experts_in
from jaxpar.config import Config, ConfigError, Model, present, replace, value_of
from jaxpar.config.schema.optimizer import EmaConfig
from jaxpar.model.parameters import trainable_specs
from jaxpar.optimizer.blockwise import is_quantized
from jaxpar.optimizer.moments import in_float32
from jaxpar.parallel.collectives import varying
from jaxpar.parallel.replicas.reduction import reduce_compressed
from jaxpar.sharding.axes import REPLICA
from jaxpar.sharding.params import flat, partition_specs
from jaxpar.step.state import init_state

#: Fields that round matmuls, with their values in float32. In float8, which the two round alike,
#: all else is float32.
COMPUTE = {"compute.dtype": "float32"}
FLOAT8 = {
    "compute.matmul_dtype": "compute",
    "compute.float8_scaling": "tensor",
    "parallel.gather_dtype": "compute",
}

#: Fields that round a state, with theirs.
STATE = {f"optimizer.{name}_dtype": "float32" for name in ("first_moment", "second_moment", "muon")}
EMA = "optimizer.ema.dtype"
STATE |= {EMA: "float32"}

SUMS, REPLICAS = "parallel.grad_reduce", "parallel.replica_reduction"

#: Meshes of matmuls and of sums, in the order of preference. Scales of float8 are powers of two:
#: that of a quarter of a weight is more often another one than that of a half.
OF_COMPUTE = ("data=2,tensor=2", "data=2,expert=2", "data=2")
OF_FLOAT8 = ("data=4,tensor=2", "data=4", "data=2,expert=2", "data=2")
OF_SUMS = ("data=4", "data=2", "expert=2", "sequence=2")

#: The largest error of rounding to bfloat16, of 8 bits, relative to the number; and its root mean
#: square: errors are uniform up to half the distance of two numbers, and logarithms of numbers
#: within a power of two, so that it is sqrt((1 - 1/4) / (2 ln 2) / 3) = 0.42 of the largest.
EPS = 2.0**-8
ROOT_MEAN_SQUARE = 0.42 * EPS

#: Results that a layer rounds, one after another, from its input to its output: two norms, the
#: products before and after attention, its two inside, two of the feed-forward, its hidden values,
#: and the residual stream. A backward has as many.
IN_LAYER = 10


def gradient_bound(m: Model) -> float:
    """Return the least bound on the error of a gradient, by length, of two runs in bfloat16.

    N results are rounded one after another between the embedding, the loss and a gradient. Their
    errors are independent, so that their squares add up to N of a rounding, and to 2 N between two
    runs that round differently. Routers have the stream after half of the layers, in the mean.

    Returns:  sqrt(2 N) roundings; with experts, with the root of the share of `other_rows`.
    """
    layers = m.num_layers + m.mtp_depth
    error = ROOT_MEAN_SQUARE * math.sqrt(2 * 2 * IN_LAYER * layers)
    of_logits = ROOT_MEAN_SQUARE * math.sqrt(IN_LAYER * layers / 2)
    rows = (other_rows(of, of_logits) for of in experts_in(m))
    return math.sqrt(error**2 + max(rows, default=0.0))


def other_rows(of: Experts, error: float) -> float:
    """Return the share of an expert's rows that two runs do not have in common.

    A token has another expert where the k-th and the next of its E logits change places. Logits are
    distributed normally, with a density E p at the k-th, and the distance of two changes by twice
    their error between two runs, by 2 / sqrt(2 pi) of it in the mean towards each other. Each such
    row is missing in one gradient, and another is too many.

    Args:     error: of logits, relative to their deviation, in each run.
    """
    share, normal = of.experts_per_token / of.num_experts, NormalDist()
    if share == 1:
        return 0.0
    near = of.num_experts * normal.pdf(normal.inv_cdf(1 - share))
    changed = near * 2 * error * normal.pdf(0)
    return 2 * changed / of.experts_per_token


def sum_bound(devices: int) -> float:
    """Return the bound on the error of a sum over devices, by length: each of its terms, and of its
    partial sums, is rounded once. Gradients of different tokens are no longer than their sum."""
    return devices * EPS


#: Where the terms of a gradient cancel, as in the gain of a norm, it is more: up to this many times
#: what rounding does to it on one device. Each of two runs is as far from the exact one, in any
#: direction, and in short arrays one may be twice as far as the other by chance.
BESIDE = 3.0

#: Bound on the distance of the mean ratio of lengths from 1.
MEAN = 1e-2

type Fields = Mapping[str, Any]


def rounding(subject: Subject) -> Iterator[Result]:
    """Compare what the asked config rounds."""
    exact = COMPUTE | FLOAT8 | STATE | {SUMS: "float32", REPLICAS: "float32"}
    if subject.asked.optimizer.ema is None:
        del exact[EMA]
    found = {path: value_of(subject.asked, path) for path in exact}
    rule = subject.asked.optimizer.name
    unused = {"optimizer.muon_dtype"} if rule != "muon" else set()
    fields = {p: v for p, v in found.items() if v != exact[p] and p not in unused}
    if not fields:
        yield Result("rounding", "", "small dtypes", not_run="the config is in float32")
    yield from _of(subject, fields)


#: What `every_rounding` looks at beside what a config asks for.
EVERY: tuple[Fields, ...] = (
    {"compute.dtype": "bfloat16"},
    {"compute.matmul_dtype": "float8", "parallel.gather_dtype": "float8"},
    {SUMS: "bfloat16"},
    *({REPLICAS: method} for method in ("bfloat16", "int8", "top_k")),
    *(
        {"optimizer.first_moment_dtype": dtype, "optimizer.second_moment_dtype": dtype}
        for dtype in ("bfloat16", "8bit")
    ),
    {EMA: "bfloat16"},
)


#: CPU seconds of the process after which no further dtype is looked at.
UNTIL = 400.0


def every_rounding(subject: Subject) -> Iterator[Result]:
    """Compare every dtype that a config of this model can ask for, and does not."""
    for fields in EVERY:
        asked = subject.asked
        if EMA in fields and asked.optimizer.ema is None:
            asked = replace(asked, **{"optimizer.ema": EmaConfig(decay=DECAY)})
        if all(value_of(asked, path) == value for path, value in fields.items()):
            continue  # `rounding` did
        if time.process_time() > UNTIL:
            why = f"after {UNTIL:.0f} CPU seconds"
            yield Result("rounding", "", in_words(fields), not_run=why)
            continue
        yield from _of(subject, fields)


def _of(subject: Subject, fields: Fields) -> Iterator[Result]:
    groups = (
        (_gradients, {p: v for p, v in fields.items() if p in COMPUTE}),
        (_gradients, {p: v for p, v in fields.items() if p in FLOAT8}),
        (_sums, {p: v for p, v in fields.items() if p == SUMS}),
        (_replicas, {p: v for p, v in fields.items() if p == REPLICAS}),
        (_states, {p: v for p, v in fields.items() if p in STATE}),
    )
    for run, group in groups:
        if group:
            try:
                yield from run(subject, group)
            except ConfigError as error:
                yield Result("rounding", "", in_words(group), not_run=str(error))


def in_words(fields: Fields) -> str:
    """Describe values by the last parts of their fields."""
    return ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in fields.items())


# ------------------------------------------------------------------------------------- gradients


def _trace(cfg: Config, subject: Subject, *, uneven: bool = False, exactly: bool = False) -> Arrays:
    """Return gradients. Args:     exactly: round wherever the program does."""
    mesh, options = mesh_of(cfg, subject.devices), compile_options(subject.devices)
    if exactly:
        options = options | {"xla_allow_excess_precision": False}
    batch, changed = [traces.random_batch(cfg)], _uneven if uneven else None
    return traces.mesh_trace(cfg, mesh, batch, 0, options, changed=changed).gradients


def _uneven(a: jax.Array) -> jax.Array:
    """Return matrices of layers whose size differs by 16 along each dim, as a whole as before:
    shards of random values have nearly the same largest one, and so the same scale."""
    value = np.asarray(a)
    for dim, n in enumerate(a.shape) if a.ndim > 2 else ():
        factor = 16.0 ** np.linspace(-0.5, 0.5, n if dim else 1)
        factor /= np.sqrt(np.mean(factor**2))
        value = value * factor.reshape(-1, *[1] * (a.ndim - 1 - dim))
    return jax.device_put(value.astype(a.dtype), a.sharding)


def _gradients(subject: Subject, fields: Fields) -> Iterator[Result]:
    """Compare gradients of a mesh and of one device, which round alike."""
    rounded = replace(subject.small, **dict(fields))
    names = OF_COMPUTE if "compute.dtype" in fields else OF_FLOAT8
    name, there = first_mesh(rounded, names, len(subject.devices))
    # What is gathered is rounded on a mesh alone, as the matmuls round it on one device.
    here = on(replace(rounded, **{"parallel.gather_dtype": "compute"}), ONE, len(subject.devices))
    plain, least = on(subject.small, ONE, len(subject.devices)), gradient_bound(subject.small.model)
    for uneven in (False, True) if names is OF_FLOAT8 else (False,):
        trace = functools.partial(_trace, subject=subject, uneven=uneven)
        exact, found, wanted = trace(plain), trace(there), trace(here)
        what = in_words(fields) + ", uneven weights" * uneven
        results = _compared(name, what, subject, found, wanted, least, exact)
        # Large roundings of the forward pass change the lengths of all gradients together.
        yield from itertools.islice(results, 1 if uneven else None)
    if fields.get("compute.dtype") == "bfloat16":
        yield from _few_digits(subject, rounded)


#: Meshes of which each sums gradients in one way: over microbatches, devices, and those of stages.
OF_DIGITS = ("num_microbatches=4", "data=4", "pipeline=2,num_microbatches=8")

#: The gradients that are sums in float32 on one device, too: of lookups, and of chunks of the loss.
#: Those of other matmuls are rounded there.
LOOKUP, HEAD = "embed", "head"

#: Tokens in a chunk: enough that a GPU multiplies matrices.
IN_CHUNK = 4


def _few_digits(subject: Subject, cfg: Config) -> Iterator[Result]:
    """Look for sums of gradients that are rounded: of which all numbers are bfloat16, or that
    depend on the number of chunks of the loss.

    Args:     cfg: computes in bfloat16.
    """
    what = "share of a gradient's sums that are bfloat16, compute in bfloat16"
    for name in (ONE, *OF_DIGITS):
        try:
            there = on(cfg, name, len(subject.devices))
        except ConfigError as error:
            yield Result("rounding", name, what, not_run=str(error))
            continue
        found = _trace(there, subject, exactly=True)
        if name == ONE:
            if HEAD in found:
                yield _of_chunks(there, subject, found[HEAD])
            found = {name: a for name, a in found.items() if name == LOOKUP}
            if not found:
                continue  # adapters alone are trained
        far, where = distances.worst(short_shares(found))
        yield Result("rounding", name, what, far, SHORT, where=where)


def _of_chunks(cfg: Config, subject: Subject, found: Any) -> Result:
    """Compare the gradient of the head with that of many chunks: each is rounded once in both.

    Args:     found: with the config's chunks.
    """
    chunks = cfg.train.global_batch_size * cfg.data.seq_len // IN_CHUNK
    many = _trace(replace(cfg, **{"parallel.loss_chunks": chunks}), subject, exactly=True)[HEAD]
    far = float(np.linalg.norm(found - many) / np.linalg.norm(found))
    what = f"gradient with {chunks} chunks of the loss, compute in bfloat16"
    return Result("rounding", ONE, what, far, EPS, where=HEAD)


def short_shares(found: Arrays) -> dict[str, float]:
    """Return the share of numbers of each gradient that bfloat16 has, too; zeros do not count."""
    shares = {}
    for name, a in found.items():
        bits = np.ascontiguousarray(a[a != 0], np.float32).view(np.uint32)
        shares[name] = float(np.mean(bits & 0xFFFF == 0)) if bits.size > 100 else 0.0
    return shares


#: Bound on that share. Half of the sums of two numbers of one size are bfloat16, as are those of
#: tokens that occur once.
SHORT = 0.95


def _sums(subject: Subject, fields: Fields) -> Iterator[Result]:
    """Compare gradients whose sums over devices are rounded with those of one device."""
    name, there = first_mesh(replace(subject.small, **dict(fields)), OF_SUMS, len(subject.devices))
    here = on(subject.small, ONE, len(subject.devices))
    found, wanted = _trace(there, subject), _trace(here, subject)
    least = sum_bound(num_devices(there.parallel))
    yield from _compared(name, in_words(fields), subject, found, wanted, least)


def _compared(
    mesh: str,
    what: str,
    subject: Subject,
    found: Arrays,
    wanted: Arrays,
    least: float,
    exact: Arrays | None = None,
) -> Iterator[Result]:
    """Args:     least: bound. exact: what `wanted` is without rounding, if it rounds too."""
    zero = distances.zero_gradients(subject.small.model)
    length = lambda a: float(np.linalg.norm(a.astype(np.float64).ravel()))  # noqa: E731
    known = {n: a for n, a in wanted.items() if n not in zero and length(a) > 0}
    errors = {n: length(found[n] - a) / length(a) for n, a in known.items()}
    rounded = {n: length(a - exact[n]) / length(a) if exact else 0.0 for n, a in known.items()}
    bounds = {n: max(least, BESIDE * error) for n, error in rounded.items()}
    _, name = distances.worst({n: error / bounds[n] for n, error in errors.items()})
    what_differs = f"gradients, {what}"
    yield Result("rounding", mesh, what_differs, errors[name], bounds[name], where=name)
    ratios = {n: length(found[n]) / length(a) for n, a in known.items()}
    # By inverse variance: where terms cancel, rounding changes a length by much more.
    weights = [max(rounded[n], EPS) ** -2 for n in ratios]
    mean = float(np.average([*ratios.values()], weights=weights))
    where = max(ratios, key=lambda n: abs(ratios[n] - 1))
    what = f"mean ratio of gradients, {what}"
    yield Result("rounding", mesh, what, abs(mean - 1), MEAN, where=f"{mean:.4f}, most of {where}")


# ------------------------------------------------------------------------ compressed sums

#: Steps whose sums, with the errors that are kept, must add up.
KEPT = 3


def _replicas(subject: Subject, fields: Fields) -> Iterator[Result]:
    """Sum given gradients over replicas: what is sent, and what is kept, add up to the gradients.

    Source:   Karimireddy et al. 2019 (1901.09847), algorithm 1: error feedback.
    """
    top_k = subject.asked.parallel.replica_top_k
    cfg = replace(subject.small, **dict(fields), **{"parallel.replica_top_k": top_k})
    cfg = on(cfg, "replica=2", len(subject.devices))
    mesh, specs = mesh_of(cfg, subject.devices), trainable_specs(cfg)
    kept = init_state(cfg, mesh).extra.get("feedback", ())
    kept_specs = jax.tree.map(lambda a: a.sharding.spec, kept)

    def reduce(grads: Any, kept: Any) -> tuple[Any, Any]:
        # The second replica's gradients are a multiple of the first's.
        here = jax.tree.map(lambda g: varying(g) * (1 + 0.5 * lax.axis_index(REPLICA)), grads)
        return reduce_compressed(here, kept, specs, cfg.parallel)

    of_grads = partition_specs(specs)
    whole = jax.shard_map(
        reduce, mesh=mesh, in_specs=(of_grads, kept_specs), out_specs=(of_grads, kept_specs)
    )
    step = jax.jit(whole, compiler_options=compile_options(subject.devices))
    kinds = {path: kind for path, kind in kinds_of(cfg).items() if kind.trained}
    sent, all_of = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for i in range(KEPT):
        grads = random_gradients(kinds, cfg, i)
        found, kept = step(placed(grads, cfg, mesh), kept)
        for name, a in traces.to_host(found).items():
            sent[name] = sent.get(name, 0) + a.astype(np.float64)
            all_of[name] = all_of.get(name, 0) + 2.5 * grads[name].astype(np.float64)
    for name, errors in flat(kept["errors"]).items() if kept else ():
        at = 1 if "/" in name and kinds[name].lead(errors.ndim - 1) else 0
        sent[name] += np.asarray(errors, np.float64).sum(axis=at)
    error = lambda n: np.linalg.norm(sent[n] - all_of[n]) / np.linalg.norm(all_of[n])  # noqa: E731
    far, name = distances.worst({n: float(error(n)) for n in all_of})
    bound = 1e-5 if kept else sum_bound(2)
    what = f"sums over replicas and what is kept, {in_words(fields)}"
    yield Result("rounding", "replica=2", what, far, bound, where=name)
    batch, options = traces.random_batch(cfg), compile_options(subject.devices)
    steps = traces.mesh_trace(cfg, mesh, [batch], 1, options, everything=True)
    for what, pair in steps.same.items():
        far, name = distances.worst(distances.metric_errors(*pair))
        on_cpu = subject.devices[0].platform == "cpu"
        bound = 0.0 if on_cpu else subject.tolerance
        what = f"{what}, {in_words(fields)}"
        yield Result("rounding", "replica=2", what, far, bound, where=name if far else "")


# -------------------------------------------------------------------------------------- states

#: Updates with one gradient: enough for what is lost each time to show in the mean.
UPDATES = 16

#: Updates of an average, which starts this share below the weights: each is less than the distance
#: of two bfloat16 numbers, so that roundings which repeat go on to one side.
UPDATES_OF_AVERAGE, BELOW = 48, 0.1

#: Meshes of states.
OF_STATES = ("data=2,tensor=2", "data=2", "data=1")

#: Bound on the error of a moment, by length. bfloat16: independent roundings, each of 1/sqrt(6) of
#: a distance of 2^-8 to 2^-7, add up to a factor of 1 / sqrt(1 - beta^2); roundings that repeat
#: would add up to 1 / (1 - beta). 8 bits: the distance of two codes is up to 1/9 of the number.
STORED = {"bfloat16": 2.0**-7.5 / math.sqrt(6), "8bit": 1 / 9 / math.sqrt(12)}

#: Share of the codes of 8 bits that may be unused. Second moments are positive: they have codes of
#: their own, of which none is for a negative number (Dettmers et al. 2022, 2110.02861, section 2).
UNUSED = 0.45

#: Share of a state's numbers that may differ between meshes, whose float32 values differ in the
#: last bit: some lie between the two that are rounded to.
OTHER = 1e-3


def _states(subject: Subject, fields: Fields) -> Iterator[Result]:
    """Compare stored moments and averages with numpy's, and with those of another mesh."""
    if not isinstance(subject.asked.optimizer.name, str):
        why = "the rule is your own: its moments were compared on meshes"
        yield Result("rounding", "", in_words(fields), not_run=why)
        return
    base = of_updates(subject)
    # Without clipping, whose norm is summed in another order on each mesh. The steps have one rate.
    same: dict[str, Any] = {
        "optimizer.clip_norm": 0.0,
        "optimizer.weight_decay": 0.0,
        "optimizer.ema": EmaConfig(decay=DECAY),
    }
    same["optimizer.moment_block"] = 16  # blocks that a mesh can split
    if EMA in fields:  # a slow average: what weights change by would hide its rounding
        same["optimizer.learning_rate"] = 1e-9
    cfg = replace(base, **same, **dict(fields))
    name, there = first_mesh(cfg, OF_STATES, len(subject.devices))
    here = on(cfg, ONE, len(subject.devices))
    updates = UPDATES_OF_AVERAGE if EMA in fields else UPDATES
    (found, codes), (alone, _) = (_updated(one, subject, updates) for one in (there, here))
    wanted = _exact(here, subject, updates)
    for moment, arrays in found.items():
        dtype = _dtype_of(moment, cfg)
        if dtype == "float32":
            continue
        what = f"{moment} in {dtype}"
        rate = _decay_of(moment, cfg)
        bound = 2 * STORED[dtype] / math.sqrt(1 - rate**2)
        right = wanted[moment]
        yield from _stored(name, what, arrays, right, bound)
        differ = {n: float(np.mean(a != alone[moment][n])) for n, a in arrays.items()}
        far, path = distances.worst(differ)
        what = f"share of {what} that is not as on one device"
        yield Result("rounding", name, what, far, OTHER, where=path)
        if moment in codes:
            far = 1 - codes[moment] / 256
            yield Result(
                "rounding", name, f"share of codes that {moment} does not use", far, UNUSED
            )


def _stored(mesh: str, what: str, found: Arrays, wanted: Arrays, bound: float) -> Iterator[Result]:
    length = lambda a: float(np.linalg.norm(a.astype(np.float64).ravel()))  # noqa: E731
    errors = {n: length(found[n] - a) / length(a) for n, a in wanted.items() if length(a)}
    far, path = distances.worst(errors)
    yield Result("rounding", mesh, what, far, bound, where=path)
    total = [sum(float(np.abs(a).sum()) for a in arrays.values()) for arrays in (found, wanted)]
    ratio = total[0] / total[1]
    yield Result(
        "rounding", mesh, f"mean ratio of {what}", abs(ratio - 1), MEAN, where=f"{ratio:.4f}"
    )


_FIELD = {"mu": "first_moment_dtype", "trace": "first_moment_dtype", "nu": "second_moment_dtype"}


def _dtype_of(moment: str, cfg: Config) -> str:
    if moment == "ema":
        return present(cfg.optimizer.ema).dtype
    field = _FIELD.get(moment)
    return "float32" if field is None else getattr(cfg.optimizer, field)


def _decay_of(moment: str, cfg: Config) -> float:
    o = cfg.optimizer
    return {"nu": o.beta2, "ema": DECAY, "mu": max(o.beta1, o.muon_momentum)}.get(moment, o.beta1)


def _updated(
    cfg: Config, subject: Subject, updates: int
) -> tuple[dict[str, Arrays], dict[str, int]]:
    """Return moments and average after updates, by their names, in float32; and how many 8-bit
    codes each moment uses."""
    mesh = mesh_of(cfg, subject.devices)
    update, state = update_program(cfg, mesh), init_state(cfg, mesh)
    below = lambda a: jax.device_put(_below(np.asarray(a)), a.sharding)  # noqa: E731
    late = jax.device_put(jnp.int32(LATE), state.step.sharding)
    state = state.with_extra(ema=jax.tree.map(below, state.extra["ema"]))
    state = dataclasses.replace(state, step=late)
    grads = placed(_gradient(cfg), cfg, mesh)
    for _ in range(updates):
        state = update(state, grads)
    found, codes = dict[str, Arrays](), dict[str, int]()
    for moment, arrays in moments_of(state.opt_state).items():
        field = _FIELD.get(moment)
        tree = flax.traverse_util.unflatten_dict(arrays, sep="/")
        exact = jax.tree.map(
            lambda a, field=field: np.asarray(in_float32(field, a)), tree, is_leaf=is_quantized
        )
        found[moment] = flat(exact)
        stored = [np.ravel(a) for path, a in arrays.items() if path.endswith("/codes")]
        if stored:
            codes[moment] = len(np.unique(np.concatenate(stored)))
    found["ema"] = {n: a.astype(np.float32) for n, a in traces.to_host(state.extra["ema"]).items()}
    return found, codes


def _below(a: np.ndarray) -> np.ndarray:
    return (a.astype(np.float32) * np.float32(1 - BELOW)).astype(a.dtype)


def _exact(cfg: Config, subject: Subject, updates: int) -> dict[str, Arrays]:
    """Return the same of numpy's rule."""
    kinds = {path: kind for path, kind in kinds_of(cfg).items() if kind.trained}
    rule = independent.Optimizer(cfg, kinds)
    state = init_state(cfg, mesh_of(cfg, subject.devices))
    start, begun = traces.to_host(state.params), traces.to_host(state.extra["ema"])
    weights = {n: start[n].astype(np.float64) for n in kinds}
    grads = {n: a.astype(np.float64) for n, a in _gradient(cfg).items()}
    average = {n: _below(a).astype(np.float64) for n, a in begun.items()}
    for step in range(updates):
        weights = rule.update(weights, grads)
        average = independent.averaged(average, weights, DECAY, LATE + step)
    return rule.moments | {"ema": average}


def _gradient(cfg: Config) -> Arrays:
    kinds = {path: kind for path, kind in kinds_of(cfg).items() if kind.trained}
    return random_gradients(kinds, cfg, 1)
