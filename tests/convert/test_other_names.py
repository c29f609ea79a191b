"""Folders with the tensor names that transformers has in memory, or saves, are read like published.

`published/other_names.json` has the names and shapes as transformers 5.24 makes them.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxpar.config import ConfigError
from jaxpar.convert.hf.importing import open_source
from jaxpar.convert.hf.tensor_layout import read_box
from jaxpar.sharding.grid import grid
from tests.convert import tiny

RECORDED = json.loads((Path(__file__).parent / "published" / "other_names.json").read_text())
CASES = [(name, where) for name, by_place in RECORDED.items() for where in by_place]
PACKED = [name for name, by_place in RECORDED.items() if "experts." in str(by_place.get("memory"))]

#: Names in memory, and the published ones, of tensors that have one in both.
RENAMED = (
    (r"\.mlp\.(gate|shared_experts)\.", r".block_sparse_moe.\1."),
    (r"\.block_sparse_moe\.((gate|up|down)_proj)\.", r".mlp.\1."),
    (r"\.forget_gate\.", "."),
    (r"^model\.", "backbone."),
    (r"\.attention_layer_norm\.", ".input_layernorm."),
    (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    (r"^lm_head\.", "embed_out."),
)


def in_place_of(name: str, shape: list[int], published: dict) -> tuple[np.ndarray, list[str]]:
    """A tensor under another name, and the names of the published ones that it has."""
    for pattern, replacement in RENAMED:
        other = re.sub(pattern, replacement, name)
        if other != name and other in published and list(published[other].shape) == shape:
            return published[other], [other]
    if "conv1d" in name:
        return convolution(name, published)
    if name == "lm_head.weight":  # a tied head
        return published["transformer.wte.weight"], []
    place, _, kind = name.rpartition(".")
    ends = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",)}
    ends |= {"down_proj": ("down_proj",)}
    mixtral = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    gone, experts = [], []
    for e in range(shape[0]):
        names = []
        for end in ends[kind]:
            tries = [f"{place}.{e}.{last}.weight" for last in (end, mixtral[end])]
            tries += [n.replace(".mlp.", ".block_sparse_moe.") for n in tries]
            tries += [re.sub(r"^model\.", "backbone.", n) for n in tries]
            names.append(next(n for n in tries if n in published))
        gone += names
        experts.append(np.concatenate([published[n] for n in names]))
    return np.stack(experts), gone


def convolution(name: str, published: dict) -> tuple[np.ndarray, list[str]]:
    """A convolution of queries, keys and values, or a third of one."""
    place = name.rpartition(".")[0].rpartition(".")[0]
    names = [f"{place}.{n}_conv1d.weight" for n in "qkv"]
    whole = np.concatenate([published[n] for n in names])
    if name.endswith(".conv1d.weight"):
        return whole, names
    third = "qkv".index(name.rpartition("_conv1d")[0][-1])
    parts = np.split(whole, [-(-len(whole) // 3), 2 * -(-len(whole) // 3)])  # as torch.chunk does
    return parts[third], [name]


def renamed(name: str, where: str) -> dict[str, np.ndarray]:
    """All tensors of a tiny model, with the names that transformers has."""
    published = tiny.tensors(tiny.MODELS[name])
    found, gone = {}, []
    for other, shape in RECORDED[name][where].items():
        found[other], old = in_place_of(other, shape, published)
        assert list(found[other].shape) == shape, other
        gone += old
    return {n: a for n, a in published.items() if n not in gone} | found


def write(folder: Path, name: str, arrays: dict) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny.MODELS[name]))
    tiny.write_safetensors(folder / "model.safetensors", arrays)
    return str(folder)


def parameters(folder: str) -> dict[str, np.ndarray]:
    source = open_source(folder)
    found = {}
    for entry in source.entries:
        (box,) = grid(entry.shape, entry.shape)
        found[entry.path] = read_box(entry, box, source.tensors.open)
    return found


@pytest.mark.parametrize(("name", "where"), CASES)
def test_every_parameter_is_that_of_the_published_folder(name, where, tmp_path):
    wanted = parameters(write(tmp_path / "p", name, tiny.tensors(tiny.MODELS[name])))
    found = parameters(write(tmp_path / "other", name, renamed(name, where)))
    assert found.keys() == wanted.keys()
    for path, values in wanted.items():
        np.testing.assert_array_equal(found[path], values, err_msg=path)


@pytest.mark.parametrize("name", PACKED)
def test_packed_experts_may_be_transposed(name, tmp_path):
    arrays = renamed(name, "memory")
    turned = {
        n: np.ascontiguousarray(a.transpose(0, 2, 1)) if ".experts." in n else a
        for n, a in arrays.items()
    }
    wanted = parameters(write(tmp_path / "p", name, tiny.tensors(tiny.MODELS[name])))
    found = parameters(write(tmp_path / "other", name, turned))
    for path, values in wanted.items():
        np.testing.assert_array_equal(found[path], values, err_msg=path)


def test_the_matrices_of_packed_experts_may_be_square(tmp_path, monkeypatch):
    for width in (16, 32):  # 2 * width, and width, is that of the model
        values = tiny.MODELS["qwen3_moe"] | {"moe_intermediate_size": width}
        monkeypatch.setitem(tiny.MODELS, "qwen3_moe", values)
        published = tiny.tensors(values)
        wanted = parameters(write(tmp_path / f"p{width}", "qwen3_moe", published))
        for turn in (False, True):
            arrays = {n: a for n, a in published.items() if ".experts." not in n}
            for layer in range(2):
                place = f"model.layers.{layer}.mlp.experts."
                gate, up, down = (
                    np.stack([published[f"{place}{e}.{end}_proj.weight"] for e in range(6)])
                    for end in ("gate", "up", "down")
                )
                packed = {"gate_up_proj": np.concatenate([gate, up], 1), "down_proj": down}
                for end, a in packed.items():
                    a = np.ascontiguousarray(a.transpose(0, 2, 1)) if turn else a
                    arrays[place + end] = a
            found = parameters(write(tmp_path / f"o{width}{turn}", "qwen3_moe", arrays))
            for path, values_of in wanted.items():
                np.testing.assert_array_equal(found[path], values_of, err_msg=path)


@pytest.mark.parametrize(
    "shape", [(6, 0, 32), (10**6, 0, 32), (6, 47, 32), (6, 48, 31), (6, 48), (5, 48, 32)]
)
def test_packed_experts_of_another_shape_are_named(shape, tmp_path):
    arrays = renamed("qwen3_moe", "memory")
    arrays["model.layers.0.mlp.experts.gate_up_proj"] = np.zeros(shape, np.float32)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.experts\.") as caught:
        open_source(write(tmp_path / "m", "qwen3_moe", arrays))
    assert "download" not in str(caught.value)


def test_missing_and_extra_tensors_are_both_named(tmp_path):
    arrays = tiny.tensors(tiny.MODELS["llama2"])
    arrays["model.layers.0.mlp.w1.weight"] = arrays.pop("model.layers.0.mlp.gate_proj.weight")
    with pytest.raises(ConfigError) as caught:
        open_source(write(tmp_path / "m", "llama2", arrays))
    message = str(caught.value)
    assert "model.layers.0.mlp.gate_proj.weight" in message
    assert "model.layers.0.mlp.w1.weight" in message and "download" not in message
