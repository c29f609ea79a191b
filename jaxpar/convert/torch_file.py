"""`to-torch`: exports a checkpoint as tensors with declared names, which `torch_model` loads.

torch.save writes a pickle; jaxpar runs none. torch is an optional package: it is imported only
here, and by the checks that use `transformers` and PEFT.
"""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.checkpoint.saved import read_saved, saved_config
from jaxpar.components.attention import Attention
from jaxpar.components.component import Term
from jaxpar.components.model import Layer, Model
from jaxpar.config import ConfigError
from jaxpar.config.code import with_code
from jaxpar.config.errors import require_package
from jaxpar.config.layers import OURS, check_layers
from jaxpar.config.names import name_of
from jaxpar.config.schema.optimizer import TRAINED, Weights
from jaxpar.convert import selfcheck
from jaxpar.convert.hf import exporting
from jaxpar.convert.hf.exporting import Opened
from jaxpar.convert.peft.merging import MergedArrays, check_merge
from jaxpar.convert.safetensors_file import Stored, create_file
from jaxpar.model.parameters import param_specs, top_specs
from jaxpar.runtime.files import atomic, outputs
from jaxpar.runtime.files.outputs import require_space
from jaxpar.runtime.progress import meter
from jaxpar.sharding.grid import Box
from jaxpar.sharding.params import ParamSpec, flat

SAFETENSORS = ".safetensors"

#: Allowed suffixes of the file's name.
ENDINGS = (".pt", ".pth", SAFETENSORS)


def check_file(file: Path) -> None:
    """Raises:   ConfigError for a file that cannot be written, or has another suffix, or one of
    PyTorch when torch is not installed."""
    outputs.check_file("FILE", str(file), "model.pt", endings=ENDINGS, new=True)
    if (about := file.with_suffix(".json")).exists():
        raise ConfigError("FILE", str(about), "already exists", "use a new file")
    if file.suffix != SAFETENSORS:
        use = f"use {file.with_suffix(SAFETENSORS)}, which does not need it"
        require_package("torch", "FILE", str(file), use)


def open_export(
    run: str | Path,
    step: int | None = None,
    dtype: str | None = None,
    weights: Weights = TRAINED,
    code: Sequence[str] = (),
) -> Opened:
    """Open a checkpoint for export. Any model has a form in PyTorch.

    Args:     as `exporting.open_export`. code: files with the classes of a model's own components.
    Raises:   ConfigError when there is no such checkpoint, or a class is not loaded.
    """
    saved = read_saved(run, step)
    cfg = with_code(saved_config(run, saved.step), code)
    check_layers(cfg.model.layers)
    return exporting.open_checkpoint(run, saved.step, cfg, dtype, weights)


def to_torch(
    export: Opened,
    file: Path,
    log: Callable[[str], None],
    tolerance: float | None = selfcheck.TOLERANCE,
) -> None:
    """Write FILE, tensors by name, and FILE.json, the model as `describe` returns it.

    The weights of a .pt are first written to a temporary file, which torch.save reads through a
    memory map. This needs little memory, but twice the disk space. Both files appear when they are
    complete and checked.

    Args:     export: from `open_export`. log: called with each result. tolerance: of the
              self-check; None to skip it.
    Raises:   ConfigError as `check_file`; CheckFailed.
    """
    check_file(file)
    m, about = export.config.model, file.with_suffix(".json")
    tensors = tensors_of(m)
    dtypes = {name: export.dtype if t.spec.trainable else "float32" for name, t in tensors.items()}
    shapes = {name: t.shape for name, t in tensors.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=file.parent) as folder:
        written = Path(folder) / file.name
        raw = written.with_suffix(SAFETENSORS)
        stored = create_file(raw, shapes, dtypes)
        num_bytes = sum(s.num_bytes for s in stored.values())
        require_space("FILE", file, (1 if written == raw else 2) * num_bytes)
        described = describe(m)
        (Path(folder) / about.name).write_text(json.dumps(described, indent=2) + "\n")
        with meter(num_bytes) as progress:
            for path, parameter in parameters_of(m).items():
                parts = functools.partial(parameter.parts, stored)
                exporting.copy_parameter(export, path, parameter.spec.shape, parts, progress)
            if written != raw:
                save(stored, written)
            log(f"wrote {progress.summary(max(s.num_bytes for s in stored.values()))}")
        if m.mtp_depth:
            log("left out multi-token prediction, which only training computes")
        for sentence in described["needs"].values():
            log(sentence)
        if tolerance is not None:
            _check(export, stored, written, tolerance, log)
        atomic.publish(Path(folder, about.name), about)
        atomic.publish(written, file)


def _check(
    export: Opened,
    stored: Mapping[str, Stored],
    file: Path,
    tolerance: float,
    log: Callable[[str], None],
) -> None:
    """Compare the logits of a run with those of the written tensors, and of PyTorch on the file.

    Raises:   CheckFailed beyond the tolerance.
    """
    m, parameters = export.config.model, parameters_of(export.config.model)
    if isinstance(export.arrays, MergedArrays):
        check_merge(export.arrays, export.config, tolerance, log)
    run = selfcheck.run_reader(export.arrays, m, export.dtype)
    read = lambda path, box: parameters[path].read(stored, box)  # noqa: E731
    tokens, ours = selfcheck.compare_readers(m, run, read, "the written file", tolerance, log)
    left_out = "components need code" if code_needed(m) else selfcheck.why_not_in_torch(m)
    if left_out is None:
        selfcheck.compare(torch_logits(file, tokens), ours, "PyTorch", tolerance, log)
    else:
        log(f"not compared with PyTorch: {left_out}")


def torch_logits(file: Path, tokens: np.ndarray) -> np.ndarray:
    """Compute logits float32 [B, T, V] of a written file with `torch_model`."""
    import torch

    from jaxpar.convert.torch_model import load

    with torch.no_grad():
        return load(file)(torch.from_numpy(tokens.astype(np.int64))).numpy()


def save(stored: Mapping[str, Stored], file: Path) -> None:
    """Save tensors of a file with `torch.save`."""
    import torch

    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

    def tensor(at: Stored) -> torch.Tensor:
        # torch does not know NumPy's bfloat16: pass the bytes, and view them as the dtype.
        raw = np.memmap(at.file, np.uint8, "r+", at.offset, (at.num_bytes,))
        return torch.from_numpy(raw).view(kinds[at.dtype]).reshape(at.shape)

    torch.save({name: tensor(at) for name, at in stored.items()}, file)


# ------------------------------------------------------------------------------------- the tensors


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a run, and the tensors that have its values."""

    spec: ParamSpec
    names: tuple[str, ...]
    """Of its one tensor, or of that of each layer of the stack."""
    stacked: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        return self.spec.shape[1:] if self.stacked else self.spec.shape

    def parts(
        self, stored: Mapping[str, Stored], box: Box, mode: str = "r+"
    ) -> Iterator[tuple[tuple[int, ...], str, np.ndarray]]:
        """Yield the part of each tensor that is in a box: `exporting.Parts`."""
        if not self.stacked:
            yield (), self.names[0], stored[self.names[0]].open(mode)[box]
            return
        inner: Any = (*box[1:], ...)
        for i, name in enumerate(self.names[box[0]]):
            yield (i,), name, stored[name].open(mode)[inner]

    def read(self, stored: Mapping[str, Stored], box: Box) -> np.ndarray:
        """Read a box, float32."""
        parts = [part.astype(np.float32) for _, _, part in self.parts(stored, box, "r")]
        return np.stack(parts) if self.stacked else parts[0]


def parameters_of(m: Model) -> dict[str, Parameter]:
    """Return all parameters by path, but those of multi-token prediction: only training computes
    its modules. Tensors have the declared names, those of layers after the place of the layer."""
    found = {}
    for path, spec in flat(param_specs(m)).items():
        stack, _, name = path.partition("/")
        if not name:
            found[path] = Parameter(spec, (path,), stacked=False)
        elif stack in m.stacks:
            names = tuple(f"layers.{i}.{name}" for i in m.places_of(stack))
            found[path] = Parameter(spec, names, stacked=True)
    return found


def tensors_of(m: Model) -> dict[str, Parameter]:
    """Return the parameter of each tensor, layer by layer."""
    found = {name: p for p in parameters_of(m).values() for name in p.names}
    return dict(sorted(found.items(), key=lambda item: exporting.in_order(item[0])))


# ---------------------------------------------------------------------------------- the composition


def describe(m: Model) -> dict[str, Any]:
    """Return a model as JSON: its fields, the shapes of its own weights, the different layers, the
    index of each layer in order, and what code in PyTorch it needs. Unlike
    `config.layers.to_values`, it has every field, and the shapes of weights, so that its reader
    needs no declarations."""
    fields = {f.name: getattr(m, f.name) for f in dataclasses.fields(m)}
    return {
        "model": {name: _values(value) for name, value in fields.items() if name != "layers"},
        "weights": {name: list(spec.shape) for name, spec in top_specs(m).items()},
        "distinct": [_layer(layer, m) for layer in m.distinct],
        "order": [m.distinct.index(layer) for layer in m.layers],
        "needs": code_needed(m),
    }


def _layer(layer: Layer, model: Model) -> dict[str, Any]:
    terms = {role: getattr(layer, role) for role in ("mixer", "feed_forward")}
    described = {role: term and _term(term, model) for role, term in terms.items()}
    fields = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)}
    of_terms = {name for term in described.values() if term for name in term["weights"]}
    own = {n: list(w.shape) for n, w in layer.weights(model).items() if n not in of_terms}
    return fields | described | {"weights": own}


def _term(term: Term, model: Model) -> dict[str, Any]:
    """Describe a component: its class, that of jaxpar which it is or extends, fields, weights."""
    name, base, _ = _class_of(term)
    return {"class": name, "base": base, "fields": _values(term), "weights": _shapes(term, model)}


def _class_of(term: Term) -> tuple[str, str | None, str]:
    """Return the name of a component's class, that of the class of jaxpar which it is or extends,
    and the method that PyTorch does not have yet."""
    kind = type(term)
    base = next((one.__name__ for one in kind.__mro__ if OURS.get(one.__name__) is one), None)
    name = kind.__name__ if OURS.get(kind.__name__) is kind else name_of(kind)
    if base is None:
        return name, None, "forward(self, x, weights, positions, segments)"
    own = term.own_methods if isinstance(term, Attention) else ()
    return name, base, " and ".join(_OF_ATTENTION[method] for method in own)


#: Methods of a subclass of `Attention`, as those of `TorchAttention`.
_OF_ATTENTION = {
    "heads": "heads(self, q, k, v, seen)",
    "attending": "attending(self, q, k, v, w)",
}


def _shapes(term: Term, model: Model) -> dict[str, list[int]]:
    return {name: list(weight.shape) for name, weight in term.declared(model).items()}


def code_needed(model: Model) -> dict[str, str]:
    """Return, by class of a component that is not jaxpar's, what code in PyTorch it needs."""
    terms = [one for of in model.layers for one in (of.mixer, of.feed_forward) if one]
    weights: dict[tuple[str, str | None, str], dict[str, None]] = {}
    for term in terms:
        shapes = ", ".join(f"{name} {shape}" for name, shape in _shapes(term, model).items())
        weights.setdefault(_class_of(term), {})[shapes] = None
    return {
        name: f"{name} needs code in PyTorch: load(FILE, components={{{name!r}: YOURS}}), where "
        f"YOURS is a subclass of torch_model.Torch{base or 'Component'} that defines {method}. Its "
        f"weights: {'; or '.join(shapes)}"
        for (name, base, method), shapes in weights.items()
        if method
    }


def _values(node: Any) -> Any:
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {f.name: _values(getattr(node, f.name)) for f in dataclasses.fields(node)}
    return list(map(_values, node)) if isinstance(node, tuple) else node
