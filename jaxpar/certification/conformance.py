"""The checks of `jaxpar.extend.check`: what a component must be, on one device and on meshes.

The component gets two layers of a small model. What it computes alone, its gradients on meshes, a
checkpoint, text and bfloat16 are each compared by the functions of `certify` and the tests.
"""

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.certification import checkpoints, small_config, text, traces
from jaxpar.certification.command import start_devices
from jaxpar.certification.comparison import compare_meshes
from jaxpar.certification.meshes import parse_meshes, resolve_meshes
from jaxpar.certification.results import Subject
from jaxpar.components.attention import Attention
from jaxpar.components.component import FeedForward, Mixer, Term
from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Glu
from jaxpar.components.model import Layer
from jaxpar.config import Config, ConfigError, Model, RunConfig, replace
from jaxpar.config.serialize import from_json, to_json
from jaxpar.model.plain.decoder import plain
from jaxpar.sharding.mesh import axis_sizes, make_mesh

#: Devices that the meshes have.
DEVICES = 4

#: The meshes of gradients, and those of layers with experts in addition.
MESHES = (
    "data=2,tensor=2",
    "sequence=2,tensor=2",
    "pipeline=2,data=2,num_microbatches=2",
    "data=4,zero=1",
)
OF_EXPERTS = ("expert=2,tensor=2", "expert=4")

#: The meshes between which a checkpoint goes.
SAVED_ON, RESUMED_ON = "data=2,tensor=2", "pipeline=2,num_microbatches=2"

#: Bound on the error of a gradient in bfloat16, relative to its length. One of 0.02 is usual, and
#: of 0.12 where a router chooses another expert for a few tokens.
BFLOAT16 = 0.2


class CheckError(AssertionError):
    """A component is not what `check` requires. A line for each failure says what differs."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A component in a small model."""

    layer: Layer
    cfg: Config
    tolerance: float

    @property
    def terms(self) -> list[Term]:
        """Its mixer and its feed-forward."""
        return [one for one in (self.layer.mixer, self.layer.feed_forward) if one is not None]

    def on(self, mesh: str) -> Config:
        """Return the config on a mesh."""
        parallel = parse_meshes([mesh], self.cfg.parallel)
        return resolve_meshes(self.cfg, parallel, DEVICES, given=True)[0][mesh]


def check(
    part: Mixer | FeedForward | Layer,
    *,
    d_model: int,
    seq_len: int,
    meshes: Sequence[str] | None,
    tolerance: float,
) -> None:
    """As `jaxpar.extend.check`."""
    layer = _layer(part, d_model)
    case = Case(layer, _config(layer, d_model, seq_len), tolerance)
    if len(start_devices(RunConfig(), DEVICES)) < DEVICES:
        rule = f"check needs {DEVICES}"
        fix = 'call jax.config.update("jax_num_cpu_devices", 4) in conftest.py, before JAX starts, '
        fix += "or set XLA_FLAGS=--xla_force_host_platform_device_count=4"
        raise ConfigError("number of devices", jax.device_count(), rule, fix)
    if meshes is None:
        meshes = MESHES + OF_EXPERTS * isinstance(layer.feed_forward, Experts)
    checks: dict[str, Callable[[], Iterator[str]]] = {
        "one device": functools.partial(_alone, case),
        "config.json": functools.partial(_as_json, case),
        "gradients": functools.partial(_on_meshes, case, tuple(meshes)),
        "checkpoint": functools.partial(_resumed, case),
        "text": functools.partial(_text, case),
        "bfloat16": functools.partial(_in_bfloat16, case),
    }
    wrong, cause = list[str](), None
    for what, run in checks.items():
        try:
            with jax.default_matmul_precision("highest"):
                wrong += [f"{what}: {one}" for one in run()]
        except Exception as error:
            cause = cause or error
            lines = str(error).strip().splitlines()
            wrong.append(f"{what}: {type(error).__name__}: {lines[0] if lines else ''}")
        if what == "one device" and wrong:
            break  # the others would say the same in other words
    if wrong:
        name = part.name if isinstance(part, Layer) else type(part).__name__
        raise CheckError("\n  ".join([f"{name} is wrong:", *wrong])) from cause


def _layer(part: Any, d_model: int) -> Layer:
    if isinstance(part, Layer):
        return part
    if isinstance(part, Mixer):
        return Layer("checked", part, Glu(d_ff=2 * d_model))
    if isinstance(part, FeedForward):
        heads = Attention(num_heads=4, num_kv_heads=2, head_dim=8)
        return Layer("checked", heads, part)
    fix = "pass a value of a class with @component, such as MyMixer(num_heads=4)"
    raise ConfigError("check", part, "takes a Mixer, a FeedForward or a Layer", fix)


def _config(layer: Layer, d_model: int, seq_len: int) -> Config:
    model = Model(d_model=d_model, vocab_size=64, layers=(layer,) * 2, init_std=0.2)
    small = {
        "model": model,
        "data.seq_len": seq_len,
        "train.global_batch_size": 8,
        "optimizer.warmup_steps": 0,
        "optimizer.learning_rate": 1e-2,
    }
    return small_config.steady(small_config.float32(replace(Config(), **small)))


# ------------------------------------------------------------------------------- on one device


def _alone(case: Case) -> Iterator[str]:
    """Compute each component alone: its weights, its dtype, and the tokens that it reads."""
    model, batch = case.cfg.model, traces.random_batch(case.cfg)
    where = jnp.asarray(batch.positions), jnp.asarray(batch.segment_ids)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((*batch.tokens.shape, model.d_model)), jnp.float32)
    for term in case.terms:
        name, declared = type(term).__name__, term.declared(model)
        values = {n: rng.standard_normal(w.shape) * _std(w.shape) for n, w in declared.items()}
        weights = {n: jnp.asarray(a, jnp.float32) for n, a in values.items()}
        compute = jax.jit(lambda x, w, term=term: plain(term, x, w, *where, model))
        try:
            y = compute(x, weights)
        except KeyError as error:
            yield f"{name} reads the weight {error}, which `weights` does not declare"
            continue
        if (y.shape, y.dtype) != (x.shape, x.dtype):
            yield f"{name} returns {y.dtype} {y.shape}, not {x.dtype} {x.shape}, as x is"
            continue
        if not np.array_equal(y, compute(x, weights), equal_nan=True):
            yield f"{name} returns other numbers for the same input"
        yield from _unread(name, term, declared, compute, x, weights)
        yield from _reads(name, term, compute, x, weights, batch)


def _std(shape: tuple[int, ...]) -> float:
    return 1 / math.sqrt(max(shape[0], 1)) if len(shape) > 1 else 1.0


def _unread(name: str, term: Term, declared, compute, x, weights) -> Iterator[str]:
    """Name the declared weights on which nothing depends."""
    grads = jax.grad(lambda w: jnp.sum(jnp.sin(compute(x, w))))(weights)
    for weight, grad in grads.items():
        if declared[weight].trainable and not np.any(grad):
            yield f"{name} declares the weight {weight!r}, and nothing depends on it"


def _reads(name: str, term: Term, compute, x, weights, batch) -> Iterator[str]:
    """Name the tokens that a token depends on, and must not: change one, and look at the others."""
    y = np.asarray(compute(x, weights))
    at = x.shape[1] // 2
    changed = np.asarray(compute(x.at[:, at].add(1.0), weights))
    error = np.abs(changed - y).max(axis=-1) / np.abs(y).max()
    place, segments = np.arange(x.shape[1]), batch.segment_ids
    others = {
        "tokens before it": np.broadcast_to(place < at, error.shape),
        "tokens of other documents": segments != segments[:, at : at + 1],
    }
    if isinstance(term, FeedForward):
        others = {"other tokens": np.broadcast_to(place != at, error.shape)}
    for what, rows in others.items():
        worst = error[rows].max()
        if not worst < ALONE:
            yield f"{name}: a token changes {what}, by {worst:.1e} of the largest value"


#: Bound on what a token does to those that do not depend on it: their sums may be reordered.
ALONE = 1e-5


def _as_json(case: Case) -> Iterator[str]:
    written = to_json(case.cfg)
    if to_json(from_json(written)) != written:
        yield "the fields do not come back from JSON: use numbers, texts, components, tuples"


# ----------------------------------------------------------------------------------- on meshes


def _on_meshes(case: Case, meshes: tuple[str, ...]) -> Iterator[str]:
    """Compare losses and gradients with the plain form."""
    configs = {}
    for mesh in meshes:
        try:
            configs[mesh] = case.on(mesh)
        except ConfigError as error:
            yield f"{mesh}: {error}"
    subject = Subject(case.cfg, case.cfg, configs, {}, jax.devices(), 0, case.tolerance)
    for found in compare_meshes(subject):
        of_mesh = found if isinstance(found, list) else [found]
        yield from (str(result) for result in of_mesh if not result.passed)


def _mesh_of(cfg: Config) -> Any:
    p = cfg.parallel
    return make_mesh(p, jax.devices()[: math.prod(axis_sizes(p))])


def _resumed(case: Case) -> Iterator[str]:
    """Save a state, and load the checkpoint on another mesh."""
    with tempfile.TemporaryDirectory() as folder:
        saved = checkpoints.SavedState.of(case.on(SAVED_ON), Path(folder), jax.devices())
        for what, names in saved.reloaded(case.on(RESUMED_ON), jax.devices()).items():
            yield from (f"{what}, saved on {SAVED_ON}: {name} differs" for name in names)


# ---------------------------------------------------------------------------------------- text


def _text(case: Case) -> Iterator[str]:
    """Compare the logits of tokens one at a time with those of complete texts in plain form."""
    for ways in text.RANKS:
        for error, where in text.Served.of(case.cfg, ways, jax.devices()).errors():
            if not error < case.tolerance:
                yield (
                    f"tensor={ways}: the logits after {where} are off by {error:.1e} from those of "
                    "a complete text"
                )


# ----------------------------------------------------------------------------------- precision


def _in_bfloat16(case: Case) -> Iterator[str]:
    """Compare the gradients of the component's weights in bfloat16 with those in float32."""
    batch, one = traces.random_batch(case.cfg), case.on("data=1")
    rounded = replace(one, **{"compute.dtype": "bfloat16"})
    mesh = _mesh_of(one)
    wanted, found = (traces.mesh_trace(cfg, mesh, [batch], 0) for cfg in (one, rounded))
    for name, right in wanted.gradients.items():
        error = np.linalg.norm(found.gradients[name] - right) / np.linalg.norm(right)
        if name.startswith(f"{case.layer.name}/") and not error < BFLOAT16:
            yield f"the gradient of {name} in bfloat16 is off by {error:.1e}, allowed {BFLOAT16}"
