"""`from-megatron`: converts a checkpoint of Megatron-LM to a run with a checkpoint of step 0."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.checkpoint import weights_alone
from jaxpar.components.attention import Attention
from jaxpar.config import ConfigError
from jaxpar.convert import selfcheck
from jaxpar.convert.hf.config import model_of
from jaxpar.convert.hf.config_file import Values
from jaxpar.convert.hf.families import LLAMA, MIXTRAL
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.folder import Tensors, check_tensors
from jaxpar.convert.hf.importing import PublishedModel, config_for, new_run, source_config
from jaxpar.convert.hf.names import Names, entries_of
from jaxpar.convert.hf.tensor_layout import Entry, shape_of, tensor_name
from jaxpar.convert.megatron.checkpoint import AGAIN, Checkpoint, Sharded, open_checkpoint
from jaxpar.convert.megatron.torch_zip import Built, Pairs, UnreadablePickle
from jaxpar.convert.run_arrays import open_run
from jaxpar.convert.safetensors_file import DTYPES

# ---------------- Megatron-LM's arguments, as a checkpoint holds them, as the keys of a config.json


#: Keys of config.json, by the argument with the same meaning.
KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "max_position_embeddings": "max_position_embeddings",
}

#: Arguments that change what a model computes, and the only value that is supported. A missing
#: argument, of an older version, has it.
REQUIRED = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "apply_layernorm_1p": False,
    "multi_latent_attention": False,
    "window_size": None,
    "apply_residual_connection_post_layernorm": False,
    "softmax_type": "vanilla",
    "attention_output_gate": False,
    "no_rope_freq": None,
    "mtp_num_layers": None,
}

#: The same for models with experts.
REQUIRED_OF_EXPERTS = {
    "moe_layer_freq": 1,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_apply_probs_on_input": False,
}

#: RoPE scaling of --use-rope-scaling: fixed in Megatron-LM, but for the factor.
_ROPE_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def arguments_of(common: Any, where: str) -> dict[str, Any]:
    """Return the arguments of a checkpoint, by name.

    Args:     common: `Checkpoint.common()`. where: for messages.
    Raises:   ConfigError when it has none.
    """
    if isinstance(common, list) and common:
        common = common[0]
    found = common.by_name().get("args") if isinstance(common, Pairs) else None
    try:
        if isinstance(found, Built) and found.of.name == "argparse.Namespace":
            return found.fields()
    except UnreadablePickle:
        pass
    rule = "does not hold Megatron-LM's arguments, which describe the model"
    fix = "use a checkpoint of Megatron-LM's pretrain_gpt.py"
    raise ConfigError("DIR", where, rule, fix)


def values_of(arguments: dict[str, Any]) -> tuple[Values, Family]:
    """Return the keys of a config.json, and the family.

    Raises:   ConfigError that names the argument that is missing or not supported.
    """
    experts = arguments.get("num_experts")
    for name, wanted in (REQUIRED | (REQUIRED_OF_EXPERTS if experts else {})).items():
        _check(name, arguments.get(name, wanted), wanted)
    values: Values = {}
    for name, key in KEYS.items():
        values[key] = _number(name, arguments.get(name))
    heads = values["num_attention_heads"]
    grouped = arguments.get("group_query_attention", False)
    groups = arguments.get("num_query_groups") if grouped else heads
    values["num_key_value_heads"] = _number("num_query_groups", groups)
    values["tie_word_embeddings"] = not arguments.get("untie_embeddings_and_output_weights", False)
    if arguments.get("use_rope_scaling"):
        factor = _number("rope_scaling_factor", arguments.get("rope_scaling_factor", 8.0))
        values["rope_scaling"] = _ROPE_SCALING | {"factor": float(factor)}
    family = MIXTRAL if experts else LLAMA
    if experts:
        values["num_local_experts"] = _number("num_experts", experts)
        topk = arguments.get("moe_router_topk", 2)
        values["num_experts_per_tok"] = _number("moe_router_topk", topk)
        width = arguments.get("moe_ffn_hidden_size") or arguments.get("ffn_hidden_size")
        values["intermediate_size"] = _number("moe_ffn_hidden_size", width)
    values |= {"architectures": [family.architecture], "model_type": family.model_type}
    return values | {"hidden_act": "silu"}, family


def _check(name: str, found: Any, wanted: Any) -> None:
    good = found == wanted if isinstance(found, bool | int | float | str) else found is wanted
    if not good:
        shown = found if isinstance(found, bool | int | float | str | None) else "(an object)"
        rule = "is not supported for a checkpoint of Megatron-LM"
        raise ConfigError(f"--{name.replace('_', '-')}", shown, rule, f"it must be {wanted!r}")


def _number(name: str, found: Any) -> int | float:
    if isinstance(found, bool) or not isinstance(found, int | float):
        shown = found if isinstance(found, bool | str | None) else "(an object)"
        fix = "use a checkpoint of Megatron-LM's pretrain_gpt.py"
        raise ConfigError(f"--{name.replace('_', '-')}", shown, "must be a number", fix)
    return found


# ---------------------------------- Parameters in Megatron-LM's tensors, which hold several of them
#
# `linear_qkv` has, for each key-value head, the rows of its query heads, then of its key, then of
# its value. `linear_fc1` has all rows of the gate, then those of the up projection. The norm before
# each is named after it in the fused layers of Transformer Engine. Layers are the first dimension
# of a tensor (and experts the second), or in its name where layers differ.


_LAYERS = "decoder.layers."
_LAYER = _LAYERS + "{L}."

#: The tensors that hold parameters. A part of a tensor is in brackets.
NAMES = Names(
    top={
        "embed": "embedding.word_embeddings.weight",
        "final_norm": "decoder.final_layernorm.weight",
        "head": "output_layer.weight",
    },
    layer=_LAYER,
    weights={
        "attn_norm": "self_attention.linear_qkv.layer_norm_weight",
        "wq": "self_attention.linear_qkv.weight[query]",
        "wk": "self_attention.linear_qkv.weight[key]",
        "wv": "self_attention.linear_qkv.weight[value]",
        "wo": "self_attention.linear_proj.weight",
        "mlp_norm": "mlp.linear_fc1.layer_norm_weight",
        "w_gate": "mlp.linear_fc1.weight[gate]",
        "w_up": "mlp.linear_fc1.weight[up]",
        "w_down": "mlp.linear_fc2.weight",
    },
    experts={
        "router": "mlp.router.weight",
        "w_gate": "mlp.experts.{E}.linear_fc1.weight[gate]",
        "w_up": "mlp.experts.{E}.linear_fc1.weight[up]",
        "w_down": "mlp.experts.{E}.linear_fc2.weight",
    },
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


def find_views(checkpoint: Checkpoint, entries: list[Entry], attention: Attention) -> Tensors:
    """Find the parameters of the entries in a checkpoint.

    Raises:   ConfigError for a tensor of another dtype, or that is none of the parameters.
    """
    heads, width = attention.num_kv_heads, attention.head_dim
    groups = attention.num_heads // heads, heads, width
    views, used = {}, set()
    for entry in entries:
        for index in np.ndindex(*shape_of(entry.stacked, entry.sizes)):
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


def open_source(folder: str | Path) -> PublishedModel:
    """Open a checkpoint, and check that all tensors exist, with their shapes.

    Raises:   ConfigError that names the argument, the tensor or the file that is wrong.
    """
    checkpoint = open_checkpoint(Path(folder))
    arguments = arguments_of(checkpoint.common(), str(checkpoint.folder))
    values, family = values_of(arguments)
    _check_count("--num-layers", values["num_hidden_layers"], num_layers(checkpoint))
    if family is MIXTRAL:
        experts = num_experts(checkpoint)
        _check_count("--num-experts", values["num_local_experts"], experts)
    embed = checkpoint.tensors.get("embedding.word_embeddings.weight")
    # Megatron-LM pads the vocabulary; the rows tell by how much.
    values["vocab_size"] = embed.shape[0] if embed and embed.shape else 0
    model = model_of(values, family)
    cfg = config_for(model, values)
    entries, mixer = entries_of(NAMES, model), model.layers[0].mixer
    assert isinstance(mixer, Attention)  # of both families
    tensors = find_views(checkpoint, entries, mixer)
    check_tensors(tensors, entries, "arguments")
    values |= {"dtype": tensors.dtype(), "torch_dtype": tensors.dtype()}
    return PublishedModel(
        folder=checkpoint.folder,
        name=str(checkpoint.folder),
        values=values,
        family=family,
        config=cfg,
        entries=entries,
        tensors=tensors,
    )


def _check_count(argument: str, asked: int | float, found: int) -> None:
    """Check a number of layers or experts, before a parameter of each is looked for."""
    if asked != found:
        rule = f"must be the number in the checkpoint's tensors, {found}"
        raise ConfigError(argument, asked, rule, AGAIN)


def from_megatron(
    folder: str | Path,
    run_dir: str | Path,
    log: Callable[[str], None],
    tolerance: float | None = selfcheck.TOLERANCE,
) -> PublishedModel:
    """Convert a checkpoint to a run. The run appears when it is complete.

    The largest tensor of a layer, or the embedding, is in memory at a time.

    Args:     log: called with each result. tolerance: of the self-check; None to skip it.
    Raises:   ConfigError as `open_source`, and when the run's folder is in use; CheckFailed.
    """
    source, run_dir = open_source(folder), Path(run_dir)
    cfg = source_config(source, run_dir)
    with new_run(cfg, [source], log) as temporary:
        if tolerance is not None:
            read = selfcheck.published_reader(source.entries, source.tensors)
            arrays = open_run(temporary, cfg, weights_alone.STEP)
            run = selfcheck.run_reader(arrays, cfg.model, "float32")
            selfcheck.compare_readers(cfg.model, run, read, "the checkpoint", tolerance, log)
    return source
