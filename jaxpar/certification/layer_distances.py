"""Where two observations of a step differ first, and how far they are apart in each layer.

Probes at the points of every layer give the bits, the norm and sketches of what it computes;
gradients are compared as they are.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.certification.traces import Arrays
from jaxpar.components.experts import experts_in
from jaxpar.config import Config
from jaxpar.sharding.hashing import hash_uint32
from jaxpar.step.features.own_probes import Probe

#: The points of a layer in the order in which it computes them (`Probe`).
POINTS = ("mixer_input", "mixer_output", "feed_forward_input", "feed_forward_output", "residual")


@dataclass(frozen=True)
class LayerDistances:
    """The distance of A and B in a layer, relative: of its points, and of its gradients."""

    layer: str
    forward: Mapping[str, float]
    backward: float


# ---------------------------------------------------------------------------- what the probes see

#: Random directions whose products estimate a distance, and hashes of a token's bits.
SKETCHES, HASHES = 4, 2


def probes_of(cfg: Config) -> tuple[Probe, ...]:
    """Return probes at every point: bits, norm and sketches. Sums over tokens, so that they do not
    depend on the mesh."""
    points = (*POINTS, "head", *(["router"] if experts_in(cfg.model) else []))
    made = []
    for point in points:
        values: dict[str, Callable] = {"norm": _squares}
        values |= {f"sketch{i}": functools.partial(_sketch, i) for i in range(SKETCHES)}
        values |= {f"hash{i}": functools.partial(_hash, i) for i in range(HASHES)}
        made += [
            Probe(name=f"bisect_{point}_{name}", point=point, reduce="sum", value=value)
            for name, value in values.items()
        ]
    return tuple(made)


def _squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1)


def _sketch(index: int, x: jax.Array) -> jax.Array:
    """Return the product with a random direction: the square of a difference of sums is, in the
    mean, the square of the distance of tokens that differ independently."""
    along = np.random.default_rng(index).standard_normal(x.shape[-1]).astype(np.float32)
    return jnp.sum(x.astype(jnp.float32) * along, axis=-1)


def _hash(index: int, x: jax.Array) -> jax.Array:
    """Return 10 bits that change with any bit of a token: their sum over tokens is exact."""
    x = lax.stop_gradient(x).astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    place = np.arange(1, x.shape[-1] + 1, dtype=np.uint32) * np.uint32(0x9E3779B9 + 2 * index)
    mixed = jnp.sum(hash_uint32(bits ^ place), axis=-1, dtype=jnp.uint32)
    return (hash_uint32(mixed) & 0x3FF).astype(jnp.float32)


@dataclass(frozen=True)
class StepPlace:
    """A place in a step, in the order in which it computes."""

    direction: str
    layer: int | None
    point: str


def parts_at(cfg: Config, a: tuple[Arrays, Arrays], b: tuple[Arrays, Arrays]) -> StepPlace | None:
    """Return the first place at which two observations of a step differ in bits."""
    (seen, grads), (other, others) = a, b

    def differ(point: str, layer: int | None) -> bool:
        for i in range(HASHES):
            name = f"bisect_{point}_hash{i}"
            x, y = (np.atleast_1d(s[name])[layer or 0] for s in (seen, other))
            if not (x == y or (np.isnan(x) and np.isnan(y))):
                return True
        return False

    points = POINTS if not experts_in(cfg.model) else (*POINTS[:3], "router", *POINTS[3:])
    for layer in range(cfg.model.num_layers):
        for point in points:
            if differ(point, layer):
                return StepPlace("forward", layer, point)
    if differ("head", None):
        return StepPlace("forward", None, "head")
    if seen["loss"].tobytes() != other["loss"].tobytes():
        return StepPlace("forward", None, "loss")
    wrong: dict[int | None, list[str]] = {}
    for name, at, x, y in pairs_by_layer(cfg, grads, others):
        if x.tobytes() != y.tobytes():
            wrong.setdefault(at, []).append(name)
    whole = wrong.pop(None, [])
    late = [name for name in whole if "embed" not in name]
    if late:
        return StepPlace("backward", None, late[0])
    if layers := [at for at in wrong if at is not None]:
        return StepPlace("backward", max(layers), ", ".join(wrong[max(layers)]))
    return StepPlace("backward", None, whole[0]) if whole else None


def pairs_by_layer(
    cfg: Config, a: Arrays, b: Arrays
) -> Iterator[tuple[str, int | None, np.ndarray, np.ndarray]]:
    """Yield arrays of parameters that both have: name, layer or None, of A, of B."""
    stacks: dict[str, list[int]] = {}
    for index, layer in enumerate(cfg.model.layers):
        stacks.setdefault(layer.name, []).append(index)
    for name in [name for name in a if name in b and a[name].shape == b[name].shape]:
        path = name.removeprefix("params/")
        rows = stacks.get(path.split("/")[0], [])
        if rows and a[name].ndim and len(a[name]) == len(rows):
            for at, number in enumerate(rows):
                yield path, number, a[name][at], b[name][at]
        else:
            yield path, None, a[name], b[name]


def distances_by_layer(
    cfg: Config, a: tuple[Arrays, Arrays], b: tuple[Arrays, Arrays]
) -> tuple[LayerDistances, ...]:
    """Return the distances of two observations of a step, of each layer and of the head."""
    (seen, grads), (other, others) = a, b

    def forward(point: str, layer: int) -> float:
        at = lambda s, name: float(np.atleast_1d(s[f"bisect_{point}_{name}"])[layer])  # noqa: E731
        norm = at(other, "norm")
        off = np.mean([(at(seen, n) - at(other, n)) ** 2 for n in _NAMES])
        return math.sqrt(off / norm) if norm > 0 and math.isfinite(off) else math.nan

    squares: dict[int | None, list[float]] = {}
    for _, number, x, y in pairs_by_layer(cfg, grads, others):
        found = squares.setdefault(number, [0.0, 0.0])
        found[0] += float(np.sum(np.square(x.astype(np.float64) - y)))
        found[1] += float(np.sum(np.square(y.astype(np.float64))))
    ratio = lambda of: math.sqrt(of[0] / of[1]) if of[1] > 0 else 0.0  # noqa: E731
    made = []
    for index, layer in enumerate(cfg.model.layers):
        at = {p: d for p in POINTS if math.isfinite(d := forward(p, index))}
        made.append(
            LayerDistances(f"layer {index} ({layer.name})", at, ratio(squares.get(index, [0, 0])))
        )
    whole = ratio(squares.get(None, [0, 0]))
    return (*made, LayerDistances("outside layers", {"head": forward("head", 0)}, whole))


_NAMES = tuple(f"sketch{i}" for i in range(SKETCHES))
