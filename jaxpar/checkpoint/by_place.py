"""Reads a checkpoint of a model with other layers: by the place of each, and its weights' names.

The arrays of a checkpoint are stacks of the layers with one name. If layers have other names now,
each row is read from the stack and the index that the layer at its place had. Weights that the
layer did not have are initialized as in a new run, and those that it does not have are not used.

A layer that keeps its name keeps its value. So a changed layer has another name, and nothing of the
model changes by mistake.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.traverse_util
import jax
from jax.sharding import Mesh

from jaxpar.checkpoint.saved import Saved
from jaxpar.config import Config, ConfigError, layers
from jaxpar.config.serialize import from_values
from jaxpar.config.values import to_values
from jaxpar.runtime.processes.peers import log
from jaxpar.sharding.axes import axes_of
from jaxpar.sharding.fingerprint import named_leaves, path_names
from jaxpar.sharding.params import flat
from jaxpar.step.diloco.trainers import EXCHANGE
from jaxpar.step.initial_arrays import initial_arrays
from jaxpar.step.state import abstract_logical, abstract_params
from jaxpar.step.unequal_stages import from_rows, is_split, logical_sharding

#: Reads arrays as `loading.restore_from` describes.
type Load = Callable[[Any, bool], Any]

#: Returns the shape of an array of a checkpoint, by its name.
type ShapeOf = Callable[[str], Sequence[int]]

#: A layer in a checkpoint: the name of its stack, and its index there. None for a new one.
type Row = tuple[str, int] | None


@dataclass(frozen=True)
class LayerPlaces:
    """The layers of a checkpoint and those of a model, each as JSON with all fields, in order."""

    then: tuple[dict[str, Any], ...]
    now: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, cfg: Config, saved: Mapping[str, Any]) -> "LayerPlaces":
        """Args:     saved: the config of a checkpoint, as JSON, whose code need not be there."""
        there = from_values(dict(saved)).model
        now, then = layers.as_read_by(cfg.model.layers, there.layers)
        return cls(tuple(then), tuple(now))

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """The names of the layers then and now."""
        return [one["name"] for one in self.then], [one["name"] for one in self.now]

    @property
    def moved(self) -> bool:
        """Whether arrays of the checkpoint have other rows than those of the model."""
        then, now = self.names
        return then != now

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the fields of layers that keep name and place but not value: path, then, now."""
        for then, now in zip(self.then, self.now, strict=False):
            if then["name"] == now["name"]:
                yield from _differences(f"model.{now['name']}", then, now)

    @property
    def rows(self) -> dict[str, list[Row]]:
        """The row of the checkpoint for each layer, by name."""
        then, now = self.names
        found: dict[str, list[Row]] = {}
        for i, name in enumerate(now):
            row = (then[i], then[:i].count(then[i])) if i < len(then) else None
            found.setdefault(name, []).append(row)
        return found

    def check_changes(self, what: str, fix: str, may: Callable[[str], bool] | None = None) -> None:
        """Raises:   ConfigError for the first of `changes`.

        Args:     what: has the layers. may: whether the field at an address may change.
        """
        for path, then, now in self.changes():
            if may is not None and may(path):
                continue
            rule = f"{what} has {then!r} in a layer of this name and place"
            give = "give the layers that change another name"
            raise ConfigError(path, now, rule, f"{fix} to {then!r}, or {give}")


def _differences(path: str, then: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*then, *now)):
            yield from _differences(f"{path}.{key}", then.get(key), now.get(key))
    elif then != now:
        yield path, then, now


def check_shapes(
    cfg: Config, places: LayerPlaces, names: Container[str], shape_of: ShapeOf, what: str
) -> None:
    """Check that the weights of each layer have the shapes of those at its place.

    Args:     names: of the arrays of a checkpoint. what: the checkpoint, in words.
    Raises:   ConfigError that names the layer, the weight and both shapes.
    """
    for name, array in flat(abstract_params(cfg)).items():
        stack, _, weight = name.partition("/")
        sources = dict.fromkeys(row[0] for row in places.rows.get(stack, ()) if row)
        is_top = stack not in places.rows
        for source in [f"params/{name}"] if is_top else [f"params/{s}/{weight}" for s in sources]:
            if source not in names:
                if not is_top:
                    continue
                rule = f"has {name}, which {what} does not have"
                raise ConfigError("model", name, rule, "use a new run.dir")
            there = tuple(shape_of(source))
            if there[not is_top :] != array.shape[not is_top :]:
                at = "" if is_top else f", layer {_first(places, stack, source.split('/')[1])}"
                shapes = [list(shape[not is_top :]) for shape in (array.shape, there)]
                rule = f"has the shape {shapes[0]}{at}, and {what} has {shapes[1]} there"
                rule += "" if is_top else f", in {source.removeprefix('params/')}"
                fix = "set its sizes back, or use a new run.dir to start anew"
                raise ConfigError(f"model.{name.replace('/', ': ')}", "", rule, fix)


def _first(places: LayerPlaces, stack: str, source: str) -> int:
    then, now = places.names
    return next(i for i, pair in enumerate(zip(then, now, strict=False)) if pair == (source, stack))


def in_words(cfg: Config, places: LayerPlaces, names: Iterable[str]) -> list[str]:
    """Return which layers of a model come from which of a checkpoint, a line for each pair."""
    then, now = places.names
    at: dict[tuple[str, str], list[int]] = {}
    for i, (one, other) in enumerate(itertools.zip_longest(then, now, fillvalue="")):
        at.setdefault((one, other), []).append(i)
    here, there = _weights(flat(abstract_params(cfg)), ""), _weights(names, "params/")
    lines = []
    for (one, other), indices in at.items():
        old, new = (of.get(name, []) for of, name in ((there, one), (here, other)))
        which = f"layers {_ranges(indices)}:"
        if not one:
            lines.append(f"{which} new, {other}, initialized")
        elif not other:
            lines.append(f"{which} {one} of the checkpoint, dropped")
        else:
            kept, more, less = _compared(old, new)
            line = f"{which} {one} -> {other}, {len(kept)} weights each"
            line += f"; new, initialized: {', '.join(more)}" if more else ""
            lines.append(line + (f"; dropped: {', '.join(less)}" if less else ""))
    return lines


def _compared(old: list[str], new: list[str]) -> tuple[list[str], list[str], list[str]]:
    kept = [name for name in new if name in old]
    return kept, [n for n in new if n not in kept], [n for n in old if n not in kept]


def _weights(names: Iterable[str], prefix: str) -> dict[str, list[str]]:
    """Return the names of the weights of each stack."""
    found: dict[str, list[str]] = {}
    for name in names:
        stack, _, weight = name.removeprefix(prefix).partition("/")
        if name.startswith(prefix) and weight:
            found.setdefault(stack, []).append(weight)
    return found


def _ranges(indices: Sequence[int]) -> str:
    """Return ascending numbers in words: "0-5, 8", or "0, 2, ..., 22"."""
    step = indices[1] - indices[0] if len(indices) > 3 else 1
    if step > 1 and list(indices) == list(range(indices[0], indices[-1] + 1, step)):
        return f"{indices[0]}, {indices[1]}, ..., {indices[-1]}"
    runs: list[list[int]] = []
    for i in indices:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


# ------------------------------------------------------------------------------------- loading


def by_place(cfg: Config, saved: Saved, load: Load) -> tuple[Saved, Load]:
    """Return the metadata and the arrays of a checkpoint under the names that a model has now.

    Args:     cfg: resolved, with the storage of the checkpoint; `check_shapes` has passed. load:
              reads arrays by their names in the checkpoint.
    Returns:  the metadata, whose fingerprints tell names only, and a `load` of the new names. The
              arguments themselves if the layers have the same names.
    """
    places = LayerPlaces.of(cfg, saved.config)
    if not places.moved:
        return saved, load
    reader = _Reader(cfg, saved.config, saved.fingerprints, places)

    def load_by_place(target: Any, partial: bool) -> Any:
        del partial  # what is dropped is not read
        return reader.assembled(target, load(reader.sources(target), True))

    names = {new: "" for name in saved.fingerprints for new in reader.names_now(name)}
    return dataclasses.replace(saved, fingerprints=names), load_by_place


def params_by_place(cfg: Config, mesh: Mesh, there: Config, params: Any) -> Any:
    """Return a model's parameters from those of another, which are deleted. Both are logical.

    Args:     there: the config of the other model, which `check_shapes` has compared.
    """
    config, target = to_values(there), {"params": abstract_logical(cfg, mesh).params}
    arrays = {f"params/{name}": array for name, array in flat(params).items()}
    reader = _Reader(cfg, config, arrays, LayerPlaces.of(cfg, config))
    sources = reader.sources(target)
    loaded = [_moved(arrays[name], to.sharding) for name, to in named_leaves(sources).items()]
    return reader.assembled(target, jax.tree.unflatten(jax.tree.structure(sources), loaded))[
        "params"
    ]


def _moved(x: jax.Array, to: Any) -> jax.Array:
    if x.sharding == to:
        return x
    moved = jax.block_until_ready(jax.device_put(x, to))
    x.delete()
    return moved


#: In place of an array's name: initial values.
_FRESH = ""

#: Parts of a state that consist of several trees with the names of weights.
_OF_TREES = ("diloco", "feedback")


@dataclass(frozen=True)
class _Piece:
    """How an array of the model is composed."""

    target: jax.ShapeDtypeStruct
    layers: int
    """Its dim of layers."""
    rows: tuple[tuple[str, int], ...]
    """For each row: the name of an array, or _FRESH, and a row of it."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The names, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.rows))

    def with_rows(self, number: int) -> jax.ShapeDtypeStruct:
        """Return an array like it with other rows, all of them on each device."""
        shape, to = list(self.target.shape), self.target.sharding
        shape[self.layers] = number
        if is_split(to, self.layers):
            to = logical_sharding(to, tuple(shape), self.layers)
        return jax.ShapeDtypeStruct(tuple(shape), self.target.dtype, sharding=to)


class _Reader:
    """Reads the arrays of one checkpoint."""

    def __init__(
        self, cfg: Config, config: Mapping[str, Any], names: Iterable[str], places: LayerPlaces
    ):
        """Args:     config, names: of the checkpoint, and of its arrays."""
        self._cfg, self._names, self._rows = cfg, frozenset(names), places.rows
        leading = (cfg.model, from_values(dict(config)).model)
        self._leading = {name for model in leading for name in model.leading_stacks}
        self._sizes = collections.Counter(places.names[0])
        has_trainers = config.get("diloco") is not None
        self._replicas = int(config["parallel"].get("replica", 1)) if has_trainers else 0
        self._pieces: dict[str, _Piece] = {}
        for line in in_words(cfg, places, names):
            log(f"places     {line}")

    def names_now(self, name: str) -> Iterator[str]:
        """Yield the model's names of errors of compressed sums, and of all other arrays but those
        of an exchange."""
        errors = "feedback/errors/"
        stack, _, weight = name.removeprefix(errors).partition("/")
        if name.startswith(tuple(f"diloco/{part}/" for part in EXCHANGE)):
            return
        if not name.startswith(errors) or not weight:
            yield name
            return
        for now, rows in self._rows.items():
            # The dim of replicas is another in leading layers, whose errors start anew.
            if self._leading.isdisjoint((now, stack)) and any(
                row and row[0] == stack for row in rows
            ):
                yield f"{errors}{now}/{weight}"

    def sources(self, target: Any) -> Any:
        """Return what to read, as abstract arrays, for the arrays that `target` describes."""
        found = {}
        for part, tree in target.items():
            if part in _OF_TREES:
                found[part] = {n: self._sources(of, f"{part}/{n}/") for n, of in tree.items()}
            else:
                found[part] = self._sources(tree, f"{part}/")
        return found

    def _sources(self, tree: Any, prefix: str) -> Any:
        def of_node(path: Any, node: Any) -> Any:
            if not self._has_stacks(node):
                return node
            return self._of_stacks(node, prefix + "".join(f"{n}/" for n in path_names(path)))

        return jax.tree_util.tree_map_with_path(of_node, tree, is_leaf=self._has_stacks)

    def _has_stacks(self, node: Any) -> bool:
        return isinstance(node, dict) and any(
            isinstance(node.get(stack), dict) for stack in self._rows
        )

    def _of_stacks(self, node: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Return what to read for a dict of the model's stacks, and note how to compose them."""
        arrays = flat({name: of for name, of in node.items() if name in self._rows})
        found: dict[str, Any] = {}
        for name, array in arrays.items():
            stack, _, weight = name.partition("/")
            if not isinstance(array, jax.ShapeDtypeStruct):
                continue  # optax's node without an array, for a weight that has another rule
            piece = self._piece(prefix, stack, weight, array)
            if piece is None:
                found[name] = array
                continue
            self._pieces[prefix + name] = piece
            for source in piece.sources:
                if source == _FRESH:
                    continue
                of_source = source.removeprefix(prefix)
                wanted = piece.with_rows(self._sizes[of_source.partition("/")[0]])
                if of_source not in found or is_split(array.sharding, piece.layers):
                    found[of_source] = wanted
        others = {name: of for name, of in node.items() if name not in self._rows}
        return others | flax.traverse_util.unflatten_dict(found, sep="/")

    def _piece(
        self, prefix: str, stack: str, weight: str, array: jax.ShapeDtypeStruct
    ) -> _Piece | None:
        """Return how to compose an array; None to read it as it is."""
        rows, saved = self._rows[stack], self._names
        of_each = prefix.startswith(("opt_state/", "diloco/weights/")) and self._replicas
        layers = 1 if of_each else 0
        if layers >= len(array.shape) or array.shape[layers] != len(rows):
            return None  # not by layer of this name
        found = []
        for i, row in enumerate(rows):
            source = f"{prefix}{row[0]}/{weight}" if row else _FRESH
            found.append((source, row[1]) if row and source in saved else (_FRESH, i))
        piece = _Piece(array, layers, tuple(found))
        is_there = f"{prefix}{stack}/{weight}" in saved
        return None if is_there and piece.sources == (_FRESH,) else piece

    def assembled(self, target: Any, loaded: Any) -> Any:
        """Return the arrays that `target` describes, of those that `sources` does.

        An array that was read is deleted when nothing else is composed of it, so that only a few
        arrays exist twice at a time.
        """
        arrays, made = named_leaves(loaded), self._initial()
        uses = collections.Counter(name for p in self._pieces.values() for name in p.sources)
        for name, piece in sorted(self._pieces.items(), key=lambda item: item[1].sources):
            parts = [made[name] if n == _FRESH else arrays[n] for n in piece.sources]
            made[name] = _composed(piece, parts)
            jax.block_until_ready(made[name])
            for source in (name for name in piece.sources if name != _FRESH):
                uses[source] -= 1
                if not uses[source]:
                    arrays.pop(source).delete()
        leaves = [made[name] if name in made else arrays[name] for name in named_leaves(target)]
        return jax.tree.unflatten(jax.tree.structure(target), leaves)

    def _initial(self) -> dict[str, jax.Array]:
        """Return initial values of each array that has some."""
        wanted = {
            name: piece.with_rows(len(piece.rows))
            for name, piece in self._pieces.items()
            if _FRESH in piece.sources
        }
        return initial_arrays(self._cfg, wanted, self._replicas)


def _composed(piece: _Piece, parts: Sequence[jax.Array]) -> jax.Array:
    """Compose an array of parts that `with_rows` describes, in the order of its sources."""
    shardings: list[Any] = [part.sharding for part in parts]
    target: Any = piece.target.sharding
    # Some may have PIPELINE on another dim, for other arrays that are composed of them.
    common = max(shardings, key=lambda to: len(axes_of(to.spec)))
    sizes = [part.shape[piece.layers] for part in parts]
    first = dict(zip(piece.sources, itertools.accumulate([0, *sizes]), strict=False))
    rows = [first[source] + row for source, row in piece.rows]
    alike = [x if x.sharding == common else jax.device_put(x, common) for x in parts]
    return from_rows(alike, rows, target, piece.layers)
