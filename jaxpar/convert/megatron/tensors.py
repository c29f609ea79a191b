"""Parameters in Megatron-LM's tensors, which hold several of them.

`linear_qkv` has, for each key-value head, the rows of its query heads, then of its key, then of its
value. `linear_fc1` has all rows of the gate, then those of the up projection. The norm before each
is named after it in the fused layers of Transformer Engine. Layers are the first dimension of a
tensor (and experts the second), or in its name where layers differ.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.convert.hf.folder import Tensors
from jaxpar.convert.hf.tensor_layout import Entry, Sizes, shape_of, tensor_name
from jaxpar.convert.megatron.checkpoint import Checkpoint, Sharded
from jaxpar.convert.safetensors_file import DTYPES

_LAYERS = "decoder.layers."
_LAYER = _LAYERS + "{L}."
_ATTENTION = _LAYER + "self_attention."
_EXPERT = _LAYER + "mlp.experts.{E}."

#: Parameters and the tensors that hold them. A part of a tensor is in brackets.
ENTRIES = (
    Entry("embed", "embedding.word_embeddings.weight", "VD", "V D"),
    Entry("final_norm", "decoder.final_layernorm.weight", "D", "D"),
    Entry("head", "output_layer.weight", "DV", "V D"),
    Entry("layers/attn_norm", _ATTENTION + "linear_qkv.layer_norm_weight", "LD", "D"),
    Entry("layers/wq", _ATTENTION + "linear_qkv.weight[query]", "LDHK", "HK D"),
    Entry("layers/wk", _ATTENTION + "linear_qkv.weight[key]", "LDGK", "GK D"),
    Entry("layers/wv", _ATTENTION + "linear_qkv.weight[value]", "LDGK", "GK D"),
    Entry("layers/wo", _ATTENTION + "linear_proj.weight", "LHKD", "D HK"),
    Entry("layers/mlp_norm", _LAYER + "mlp.linear_fc1.layer_norm_weight", "LD", "D"),
    Entry("layers/w_gate", _LAYER + "mlp.linear_fc1.weight[gate]", "LDF", "F D"),
    Entry("layers/w_up", _LAYER + "mlp.linear_fc1.weight[up]", "LDF", "F D"),
    Entry("layers/w_down", _LAYER + "mlp.linear_fc2.weight", "LFD", "D F"),
    Entry("layers/router", _LAYER + "mlp.router.weight", "LDE", "E D"),
    Entry("layers/w_gate", _EXPERT + "linear_fc1.weight[gate]", "LEDF", "F D"),
    Entry("layers/w_up", _EXPERT + "linear_fc1.weight[up]", "LEDF", "F D"),
    Entry("layers/w_down", _EXPERT + "linear_fc2.weight", "LEFD", "D F"),
)

#: Other names of tensors: those of the layers without fused norms.
OTHER_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}

#: What the names of a model's tensors begin with; the rest is the optimizer's.
OF_MODEL = ("decoder.", "embedding.", "output_layer.")


@dataclass(frozen=True)
class View:
    """The part of a tensor that is one parameter of one layer."""

    tensor: Sharded
    at: tuple[int, ...]
    """Its place in the leading dimensions."""
    part: str
    groups: tuple[int, int, int]
    """Query heads per key-value head, key-value heads, and a head's width."""

    @property
    def dtype(self) -> str:
        """Name of the dtype in safetensors."""
        return self.tensor.dtype

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of the tensor without its leading dimensions."""
        return self.tensor.shape[len(self.at) :]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part; that of the tensor, if it does not have the rows of its parts."""
        rows, *rest = self.inner
        each, heads, width = self.groups
        if self.part in ("gate", "up") and rows % 2 == 0:
            rows //= 2
        elif self.part in _HEADS and rows == heads * (each + 2) * width:
            rows = heads * width * (each if self.part == "query" else 1)
        return rows, *rest

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def open(self) -> np.ndarray:
        """Read the part. Raises:   ConfigError for a damaged file."""
        rows, *rest = self.inner
        first = rows // 2 if self.part == "up" else 0
        last = rows // 2 if self.part == "gate" else rows
        box = [slice(i, i + 1) for i in self.at] + [slice(first, last)]
        found = self.tensor.read((*box, *(slice(0, n) for n in rest)))[(0,) * len(self.at)]
        if self.part not in _HEADS:
            return found
        each, heads, width = self.groups
        of_group = found.reshape(heads, each + 2, width, *rest)
        return of_group[:, _HEADS[self.part]].reshape(-1, *rest)


#: The heads of a group in `linear_qkv`: those of the queries, the key, the value.
_HEADS = {"query": slice(None, -2), "key": slice(-2, -1), "value": slice(-1, None)}


def find_views(checkpoint: Checkpoint, entries: list[Entry], sizes: Sizes) -> Tensors:
    """Find the parameters of the entries in a checkpoint.

    Raises:   ConfigError for a tensor of another dtype, or that is none of the parameters.
    """
    groups = sizes["H"] // sizes["G"], sizes["G"], sizes["K"]
    views, used = {}, set()
    for entry in entries:
        for index in np.ndindex(*shape_of(entry.stacked, sizes)):
            name = tensor_name(entry, index)
            where, _, part = name.removesuffix("]").partition("[")
            for stored, at in _candidates(where, entry, index):
                if stored in checkpoint.tensors:
                    tensor = checkpoint.tensors[stored]
                    used.add(stored)
                    if _has(tensor, at, entry):
                        views[name] = View(tensor, at, part, groups)
                    break
    _check_others(checkpoint, used)
    return Tensors(views)


def _has(tensor: Sharded, at: tuple[int, ...], entry: Entry) -> bool:
    """Whether a tensor has the place, and the rank, of a parameter."""
    inner = len(tensor.shape) - len(at) == len(entry.theirs.split())
    return inner and all(i < n for i, n in zip(at, tensor.shape, strict=False))


def _candidates(
    name: str, entry: Entry, index: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors that may hold a parameter, and its place in the leading dimensions."""
    if not entry.stacked:
        yield name, ()
        return
    layer, rest = index[0], name.removeprefix(f"{_LAYERS}{index[0]}.")
    if len(index) == 2:
        rest = rest.replace(f"experts.{index[1]}.", "experts.experts.")
    for suffix in filter(None, (rest, OTHER_NAMES.get(rest))):
        yield _LAYERS + suffix, index
        yield f"{_LAYERS}{layer}.{suffix}", index[1:]


def _check_others(checkpoint: Checkpoint, used: set[str]) -> None:
    for name, tensor in checkpoint.tensors.items():
        if name in used and tensor.dtype not in DTYPES:
            fix = "save the weights in bfloat16 or float32"
            raise ConfigError(name, tensor.dtype, f"must be one of {', '.join(DTYPES)}", fix)
        if name.startswith(OF_MODEL) and name not in used:
            rule = "belongs to no parameter of a Llama or Mixtral with these arguments"
            fix = "use a model of one of these families"
            raise ConfigError(name, list(tensor.shape), rule, fix)


def num_layers(checkpoint: Checkpoint) -> int:
    """Return the number of layers that a checkpoint has tensors of."""
    end = "self_attention.linear_qkv.weight"
    if _LAYERS + end in checkpoint.tensors:
        return next(iter(checkpoint.tensors[_LAYERS + end].shape), 0)
    return sum(n.startswith(_LAYERS) and n.endswith(end) for n in checkpoint.tensors)


def num_experts(checkpoint: Checkpoint) -> int:
    """Return the number of experts that a checkpoint has tensors of."""
    names = (_LAYERS + "mlp.router.weight", _LAYERS + "0.mlp.router.weight")
    found = [checkpoint.tensors[name].shape for name in names if name in checkpoint.tensors]
    return found[0][-2] if found and len(found[0]) > 1 else 0
