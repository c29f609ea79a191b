"""Checkpoints of Megatron-LM: the logits of megatron-core, and bad files, without their pickles.

The goldens are checkpoints that megatron-core wrote from two processes with tensor parallelism,
and its own logits: goldens/make_megatron_goldens.py.
"""

import argparse
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.convert import selfcheck
from jaxpar.convert.hf import exporting
from jaxpar.convert.megatron import importing
from jaxpar.convert.megatron.checkpoint import Sharded, open_checkpoint
from jaxpar.convert.megatron.importing import (
    arguments_of,
    find_views,
    num_layers,
    values_of,
)
from jaxpar.convert.megatron.torch_zip import Pairs, UnreadablePickle, read_pickle
from tests.slow import slow

GOLDENS = Path(__file__).parent / "goldens" / "megatron"
STEP = "iter_0000010"

#: float32, largest absolute difference of any logit; the largest is about 4.
TOLERANCE = 1e-5


def silent(_: str) -> None:
    """Says nothing."""


def copied(tmp_path: Path, name: str = "llama") -> Path:
    """A golden that a test may change."""
    shutil.copytree(GOLDENS / name, tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_logits_are_those_of_megatron_core(name):
    source = importing.open_source(GOLDENS / name)
    golden = np.load(GOLDENS / name / "logits.npy")
    tokens = (np.arange(len(golden), dtype=np.int32)[None] * 7) % golden.shape[-1]
    read = selfcheck.published_reader(source.entries, source.tensors)
    found = selfcheck.logits(read, source.config.model, tokens)[0]
    assert np.abs(golden).max() > 1
    np.testing.assert_allclose(found, golden, rtol=0, atol=TOLERANCE)


def test_a_run_has_the_weights_and_goes_out_as_a_published_folder(tmp_path, capsys):
    run = tmp_path / "run"
    assert call("convert", ["from-megatron", str(GOLDENS / "llama" / STEP), str(run)]) == 0
    said = capsys.readouterr().out
    assert "compared with the checkpoint: largest difference 0.00e+00" in said
    export = exporting.open_export(str(run), None, None, None)
    assert export.family.model_type == "llama" and export.dtype == "float32"


def test_names_of_layers_that_differ_and_of_norms_that_are_not_fused():
    checkpoint_ = open_checkpoint(GOLDENS / "mixtral")
    renamed: dict[str, Sharded] = {}
    unfused = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
    for name, tensor in checkpoint_.tensors.items():
        if not name.startswith("decoder.layers."):
            renamed[name] = tensor
            continue
        for layer in range(2):
            rest = name.removeprefix("decoder.layers.")
            rest = unfused.get(rest, rest)
            renamed[f"decoder.layers.{layer}.{rest}"] = _layer(tensor, layer)
    source = importing.open_source(GOLDENS / "mixtral")
    other = replace(checkpoint_, tensors=renamed)
    assert num_layers(other) == num_layers(checkpoint_) == 2
    views = find_views(other, source.entries, source.config.model.layers[0].mixer)
    assert views.stored.keys() == source.tensors.stored.keys()
    for name in views.stored:
        np.testing.assert_array_equal(views.open(name), source.tensors.open(name))


class _Layer(Sharded):
    """A layer of a tensor, as a tensor."""

    layer: int

    def read(self, box):
        whole = Sharded(self.name, self.dtype, (2, *self.shape), self.pieces)
        return whole.read((slice(self.layer, self.layer + 1), *box))[0]


def _layer(tensor: Sharded, layer: int) -> Sharded:
    found = _Layer(tensor.name, tensor.dtype, tensor.shape[1:], tensor.pieces)
    object.__setattr__(found, "layer", layer)
    return found


# ------------------------------------------------------------------------------------ pickles


class Call:
    """What a stranger would put into a pickle."""

    def __init__(self, function, *arguments):
        self.what = function, arguments

    def __reduce__(self):
        return self.what


def test_values_of_a_pickle():
    value = {"a": [1, -2, 2**40, 1.5, "ü", b"\0", None, True, (), (1,), (1, 2, 3, 4)], "b": {}}
    for protocol in (3, 4, 5):
        found = read_pickle(pickle.dumps(value, protocol), allowed=())
        assert isinstance(found, Pairs)
        assert found.by_name()["a"] == value["a"] and found.by_name()["b"].pairs == []
    built = read_pickle(pickle.dumps(argparse.Namespace(x=1), 4))
    assert (built.of.name, built.fields()) == ("argparse.Namespace", {"x": 1})


def test_a_pickle_calls_nothing(tmp_path):
    marker = tmp_path / "it ran"
    for protocol in (2, 4):
        data = pickle.dumps(Call(Path.touch, marker), protocol)
        read_pickle(data)
        with pytest.raises(UnreadablePickle, match=r"names .*, which is refused"):
            read_pickle(data, allowed=("torch.",))
    folder = copied(tmp_path)
    (folder / STEP / ".metadata").write_bytes(data)
    with pytest.raises(ConfigError, match=r"\.metadata': cannot be read: it names"):
        importing.open_source(folder)
    assert not marker.exists()


def test_damaged_pickles_are_refused():
    good = (GOLDENS / "llama" / STEP / ".metadata").read_bytes()
    random = np.random.default_rng(0)
    for data in (b"", b"garbage", good[:-1], good[: len(good) // 2], b"\x80\x04" + b"N0" * 9):
        with pytest.raises(UnreadablePickle):
            read_pickle(data)
    with pytest.raises(UnreadablePickle, match="integer of"):
        read_pickle(pickle.dumps(2**100, 2))
    for _ in range(200):
        data = bytearray(good)
        data[random.integers(len(data))] = random.integers(256)
        try:
            read_pickle(bytes(data))
        except UnreadablePickle as error:
            assert "\n" not in str(error)


# ---------------------------------------------------------------------------------- bad files


def replaced(name: str, old: bytes, new: bytes):
    def change(folder: Path) -> None:
        file = folder / STEP / name
        data = file.read_bytes()
        assert old in data
        file.write_bytes(data.replace(old, new))

    return change


def cut(folder: Path) -> None:
    file = folder / STEP / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-2000])


BAD = {
    "no folder": (shutil.rmtree, "is not a folder"),
    "no metadata": (lambda f: (f / STEP / ".metadata").unlink(), r"has no \.metadata"),
    "another step": (
        lambda f: (f / "latest_checkpointed_iteration.txt").write_text("20"),
        "names the step '20', which is not in the folder",
    ),
    "step outside": (
        lambda f: (f / "latest_checkpointed_iteration.txt").write_text("../x"),
        "names the step '../x', which is not in the folder",
    ),
    "file is missing": (lambda f: (f / STEP / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "file is cut": (cut, "__1_0.distcp is missing or truncated"),
    "file outside": (
        replaced(".metadata", b"__1_0.distcp", b"../_0.distcp"),
        r"outside of the folder: '\.\./_0\.distcp'",
    ),
    "other tensor": (
        replaced(".metadata", b"output_layer.weight", b"output_layer.weighs"),
        r"output_layer\.weighs = \[64, 32\]: belongs to no parameter",
    ),
    "another width": (
        replaced("__0_0.distcp", b"kv_channelsq\nK\x08", b"kv_channelsq\nK\x04"),
        r"linear_qkv\.weight\[query\] = \[64, 32\]: must be of shape \[16, 32\] according to arg",
    ),
    "LayerNorm": (replaced("__0_0.distcp", b"RMSNorm", b"LayNorm"), "--normalization = 'LayNorm'"),
    "no arguments": (replaced("__0_0.distcp", b"Namespace", b"Namespice"), "does not hold Mega"),
    "damaged piece": (replaced("__1_0.distcp", b"PK\3\4", b"PK\3\5"), "__1_0.distcp': cannot be"),
    "big-endian": (replaced("__1_0.distcp", b"little", b"bigger"), "it is not little-endian"),
}


def test_counts_without_tensors_are_refused(monkeypatch):
    """A name of each would be looked for."""
    for name, argument in {"num_layers": "--num-layers", "num_experts": "--num-experts"}.items():
        found = arguments_of(open_checkpoint(GOLDENS / "mixtral").common(), "here")
        monkeypatch.setattr(importing, "arguments_of", lambda *_, a=found, n=name: a | {n: 10**12})
        with pytest.raises(ConfigError, match=f"{argument} = 10+: must be the number in"):
            importing.open_source(GOLDENS / "mixtral")


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoints_are_one_error(tmp_path, name):
    folder = copied(tmp_path)
    change, said = BAD[name]
    change(folder)
    with pytest.raises(ConfigError, match=said) as refused:
        importing.from_megatron(folder, tmp_path / "run", silent)
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


def read_mutated(folder: Path, file: str, count: int, seed: int) -> None:
    """Open a checkpoint with bytes changed or cut, and read its tensors, `count` times."""
    path, random = folder / STEP / file, np.random.default_rng(seed)
    good = path.read_bytes()
    for i in range(count):
        data = bytearray(good[: random.integers(len(good))] if i % 4 == 0 else good)
        for _ in range(random.integers(1, 6) if i % 4 else 0):
            data[random.integers(len(data))] = random.integers(256)
        path.write_bytes(bytes(data))
        try:
            source = importing.open_source(folder)
            for name in source.tensors.stored:
                source.tensors.open(name)
        except ConfigError as error:
            assert "\n" not in str(error)
    path.write_bytes(good)


@pytest.mark.parametrize(("name", "count"), [("llama", 8), slow("mixtral", 500)])
def test_mutated_checkpoints_are_read_or_one_error(tmp_path, name, count):
    """A changed byte of a weight is another weight; nothing else may come of any byte."""
    folder = copied(tmp_path, name)
    for seed, file in enumerate((".metadata", "__0_0.distcp", "__1_0.distcp")):
        read_mutated(folder, file, count, seed)


def test_arguments_that_change_the_model_are_refused():
    common = open_checkpoint(GOLDENS / "mixtral").common()
    arguments = arguments_of(common, "here")
    values, family = values_of(arguments)
    assert family.model_type == "mixtral" and values["num_experts_per_tok"] == 2
    for name, value in {
        "add_qkv_bias": True,
        "rotary_percent": 0.5,
        "moe_router_score_function": "sigmoid",
        "moe_shared_expert_intermediate_size": 64,
        "hidden_size": None,
        "num_layers": "2",
        "norm_epsilon": True,
    }.items():
        with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
            values_of(arguments | {name: value})
    scaled, _ = values_of(arguments | {"use_rope_scaling": True, "rope_scaling_factor": 32.0})
    assert scaled["rope_scaling"]["factor"] == 32.0
