"""All that a step depends on, how that of two runs differs, and a step with any of it."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpar.certification.layer_distances import probes_of
from jaxpar.certification.replay import bits_of, compiled_with, devices_of
from jaxpar.certification.traces import Arrays
from jaxpar.config import Config, replace, value_of
from jaxpar.config.fields import leaf_paths, optional_sections
from jaxpar.config.layers import flat_values
from jaxpar.config.lists.step_sizes import StepSize, config_of
from jaxpar.config.serialize import value_text
from jaxpar.config.values import to_values
from jaxpar.data.loader import open_loader
from jaxpar.monitoring.certificate import NO_STEP_READS, is_in
from jaxpar.parallel.context import order_of
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import TrainState, init_state, state_shardings, to_logical, to_running
from jaxpar.step.train_step import make_gradient_step, make_train_step

#: The kind of a difference, by the field in which configs differ; others are fields.
KINDS = {
    "compute.attention_backend": "kernel",
    "compute.recurrent_backend": "kernel",
    "compute.attention_deterministic": "kernel",
    "compute.matmul_precision": "dtype",
    "parallel.grad_reduce": "dtype",
    "parallel.replica_reduction": "dtype",
    **{path: "dtype" for path in leaf_paths() if path.endswith("dtype")},
}


@dataclass(frozen=True)
class RunDifference:
    """One difference between A and B.

    Args:
        kind: batch, weights, flag, kernel, mesh, dtype, field or version.
        name: of the flag or the field; of what differs in weights.
        a, b: the values, as text.
        reason: why it cannot be tried in this process; "" if it can.
    """

    kind: str
    name: str
    a: str
    b: str
    reason: str = ""

    def __str__(self) -> str:
        named = f"{self.kind} {self.name}" if self.name != self.kind else self.kind
        return f"{named}: {self.a} in A, {self.b} in B"


def xla_options(flags: Mapping[str, str]) -> dict[str, Any]:
    """Return XLA flags as options of a compilation. Variables of the environment are left out."""
    values: dict[str, Any] = {"": True, "true": True, "false": False}
    return {
        name: values.get(text, int(text) if text.lstrip("-").isdecimal() else text)
        for name, text in flags.items()
        if name.startswith("xla_")
    }


@dataclass(frozen=True)
class StepInputs:
    """All that a step depends on."""

    cfg: Config
    flags: Mapping[str, Any]
    batch: int
    state: TrainState | None
    """Logical, on the host. None: the initial one of the config."""
    max_segments: int

    @property
    def mesh(self) -> Mesh:
        return make_mesh(self.cfg.parallel, jax.devices()[: devices_of(self.cfg)])


class Stepper:
    """Takes steps with any inputs; programs and data are made once."""

    def __init__(self) -> None:
        self._programs: dict[Any, Any] = {}
        self._loaders: dict[Any, Any] = {}

    def batch(self, given: StepInputs) -> Batch:
        """Return the batch on the devices of the inputs' mesh."""
        key = given.cfg.data, given.cfg.train.seed, given.cfg.parallel, given.cfg.train
        if key not in self._loaders:
            order = functools.partial(order_of, given.cfg)
            self._loaders[key] = open_loader(given.cfg, given.mesh, "train", order)
        return self._loaders[key].batch(given.batch)

    def placed(self, given: StepInputs) -> TrainState:
        """Return the state on the devices of the inputs' mesh."""
        if given.state is None:
            return init_state(given.cfg, given.mesh)
        shardings = state_shardings(given.cfg, given.mesh)
        return to_running(jax.device_put(given.state, shardings), given.cfg)

    def take(self, given: StepInputs) -> tuple[dict[str, str], Arrays, dict[str, float]]:
        """Take the step. Returns:  bits of loss and norm, the state after it, loss and norm."""
        state, batch = self.placed(given), self.batch(given)
        program = self._program("step", given, state, batch)
        after, measured = program(state, batch)
        values = {name: float(measured[name]) for name in ("loss", "grad_norm")}
        return bits_of(measured), arrays_of(after, given.cfg), values

    def watched(self, given: StepInputs, batch: Batch) -> tuple[Arrays, Arrays]:
        """Return what probes see, and the gradients, logical."""
        state = self.placed(given)
        measured, grads = self._program("gradients", given, state.params, batch)(
            state.params, batch
        )
        seen = {name: np.asarray(value) for name, value in measured.items()}
        return seen, arrays_of(TrainState(0, grads, ()), given.cfg)

    def _program(self, what: str, given: StepInputs, state: Any, batch: Batch) -> Any:
        flags = tuple(sorted(given.flags.items()))
        key = what, given.cfg, batch.tokens.shape, flags, given.max_segments
        if key not in self._programs:
            size = StepSize(0, *batch.tokens.shape)
            cfg, mesh = config_of(given.cfg, size), given.mesh
            if what == "step":
                made: Any = make_train_step(cfg, mesh, given.max_segments)
            else:
                probes = (*cfg.train.probes, *probes_of(cfg))
                watched = replace(cfg, **{"train.probes": probes})
                made = make_gradient_step(watched, mesh, given.max_segments)
            self._programs[key] = compiled_with(made, given.flags, state, batch)
        return self._programs[key]


def arrays_of(state: TrainState, cfg: Config) -> Arrays:
    """Return a running state as logical arrays on the host, by path."""
    return flat_state(on_host(state, cfg))


def on_host(state: TrainState, cfg: Config) -> TrainState:
    """Return a running state as a logical one on the host."""
    return jax.device_get(to_logical(state, cfg))


def flat_state(state: TrainState) -> Arrays:
    """Return the arrays of a state on the host, by path."""
    tree = {"params": state.params, "opt_state": state.opt_state, "extra": state.extra}
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return {name(path): np.asarray(leaf) for path, leaf in leaves}


def differing(a: Arrays, b: Arrays) -> str:
    """Describe the first array that differs in bits, and how many do; "" if none does."""
    wrong = [n for n in a if n in b and a[n].tobytes() != b[n].tobytes()]
    if not wrong:
        return ""
    name = wrong[0]
    x, y = a[name], b[name]
    more = f", and {len(wrong) - 1} more arrays" if len(wrong) > 1 else ""
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{name}, of another shape or dtype{more}"
    off = x != y
    text = f"{name}, {int(off.sum())} of {x.size} elements"
    if x.dtype == np.float32 and off.any():
        ulps = np.abs(_ordered(x[off]) - _ordered(y[off])).max()
        text += f" by at most {ulps} unit{'s' if ulps > 1 else ''} in the last place"
    return text + more


def _ordered(x: np.ndarray) -> np.ndarray:
    """Return float32 as integers in the same order, so that neighbors differ by 1."""
    bits = np.ascontiguousarray(x).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(2**31) - bits, bits)


def repeated(batch: Batch, cfg: Config, index: int, many: int) -> Batch:
    """Return a batch each of whose microbatches is one of its own: of the same shape, so that the
    same program takes it."""
    p = cfg.parallel
    shards = p.replica * p.data * p.expert

    def of(x: jax.Array) -> jax.Array:
        local = len(x) // shards
        here = np.arange(index * local // many, (index + 1) * local // many)
        rows = np.concatenate([s * local + np.tile(here, many) for s in range(shards)])
        return jax.device_put(np.asarray(x)[rows], x.sharding)

    return jax.tree.map(of, batch)


def differing_fields(a: Config, b: Config) -> Iterator[RunDifference]:
    """Yield the fields that differ and that a step reads.

    Those of the mesh are one difference, and so is an optional section that only one config has.
    """
    one, other = flat_values(to_values(a)), flat_values(to_values(b))
    paths = [p for p in dict.fromkeys([*one, *other]) if one.get(p) != other.get(p)]
    paths = [p for p in paths if not is_in(p, NO_STEP_READS)]
    meshes = [p for p in paths if p.startswith("parallel.") and p not in KINDS]
    if meshes:
        told = [
            ", ".join(f"{p.removeprefix('parallel.')} {of.get(p)}" for p in meshes)
            for of in (one, other)
        ]
        yield RunDifference("mesh", "parallel", *told)
    sections = [
        s for s in optional_sections() if (value_of(a, s) is None) != (value_of(b, s) is None)
    ]
    for section in sections:
        if inside := [p for p in paths if p == section or p.startswith(f"{section}.")]:
            paths = [p for p in paths if p not in inside]
            values = ("None" if value_of(of, section) is None else "set" for of in (a, b))
            yield RunDifference("field", section, *values)
    known = set(leaf_paths())
    for path in paths:
        if path in KINDS or (path in known and path not in meshes):
            texts = value_text(path, one.get(path)), value_text(path, other.get(path))
            yield RunDifference(KINDS.get(path, "field"), path, *texts)
    if deeper := [p for p in paths if p not in known and p not in meshes]:
        told = [", ".join(f"{p} {of.get(p)}" for p in deeper) for of in (one, other)]
        yield RunDifference("field", deeper[0].split(".")[0], *told)


def mixed(a: StepInputs, b: StepInputs, some: Sequence[RunDifference]) -> StepInputs:
    """Return the inputs of A with some differences of B."""
    cfg, state, batch, flags = a.cfg, a.state, a.batch, dict(a.flags)
    for one in some:
        match one.kind:
            case "weights":
                state = b.state
            case "batch":
                batch = b.batch
                here = {p: value_of(b.cfg, p) for p in ("data.path", "data.cache_dir")}
                cfg = replace(cfg, **here)
            case "flag":
                flags.pop(one.name, None)
                flags |= {n: v for n, v in b.flags.items() if n == one.name}
            case "mesh":
                keep = [p for p in KINDS if p.startswith("parallel.")]
                kept = {p: value_of(cfg, p) for p in keep}
                cfg = replace(dataclasses.replace(cfg, parallel=b.cfg.parallel), **kept)
            case _:
                cfg = replace(cfg, **{one.name: value_of(b.cfg, one.name)})
    return StepInputs(cfg, flags, batch, state, max(a.max_segments, b.max_segments))
