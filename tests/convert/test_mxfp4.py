"""Weights in MXFP4: as `transformers` dequantizes them, a whole gpt-oss of them, and bad files."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpar.config import ConfigError
from jaxpar.convert.hf import exporting, importing
from jaxpar.convert.hf.folder import find_tensors
from jaxpar.convert.hf.mxfp4 import Mxfp4, dequantized
from jaxpar.convert.hf.tensor_layout import read_box
from jaxpar.convert.safetensors_file import read_header
from jaxpar.convert.selfcheck import logits, published_reader
from tests.convert import tiny

GOLDEN = dict(np.load(Path(__file__).parent / "goldens/mxfp4.npz"))

VALUES = tiny.MODELS["gpt_oss"]
QUANTIZED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
EXPERTS = tiny.experts_of_gpt_oss(VALUES)


def silent(_: str) -> None:
    """Says nothing."""


def write(folder: Path, values: dict, change=lambda arrays: None) -> Path:
    """A tiny gpt-oss as published: experts in MXFP4, and the rest in 16 bits in its place."""
    arrays = tiny.tensors(values)
    for name in EXPERTS:
        arrays = tiny.as_mxfp4(arrays, name)
    change(arrays)
    folder = tiny.write_folder(folder, values)
    tiny.write_safetensors(folder / "model.safetensors", arrays)
    return folder


def test_a_weight_is_that_of_transformers(tmp_path):
    arrays = {f"w_{name}": a for name, a in tiny.mxfp4_tensors().items()}
    tiny.write_safetensors(tmp_path / "x.safetensors", arrays)
    (weight,) = dequantized(read_header(tmp_path / "x.safetensors")).values()
    assert isinstance(weight, Mxfp4) and weight.shape == (2, 96, 8)
    found = weight.open()
    assert found.nbytes == weight.num_bytes
    np.testing.assert_array_equal(found.astype(np.float32), GOLDEN["weight"])


def test_the_logits_are_those_of_transformers(tmp_path):
    source = importing.open_source(write(tmp_path / "in", VALUES | QUANTIZED))
    read = published_reader(source.entries, source.tensors)
    found = logits(read, source.config.model, tiny.tokens(VALUES).astype(np.int32))
    assert np.abs(GOLDEN["logits"]).max() > 1
    assert np.abs(found[0] - GOLDEN["logits"]).max() <= 1e-5


def test_it_is_exported_without_quantization_and_the_same_numbers(tmp_path):
    folder = write(tmp_path / "in", VALUES | QUANTIZED)
    importing.from_hf(folder, tmp_path / "run", silent, tolerance=None)
    exporting.to_hf(exporting.open_export(tmp_path / "run"), tmp_path / "out", silent)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    found, published = load_file(tmp_path / "out/model.safetensors"), find_tensors(folder)
    assert found.keys() == published.stored.keys() == tiny.shapes(VALUES).keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, published.open(name).astype(np.float32))


def test_a_box_is_read_from_the_weight_that_was_dequantized_last(tmp_path, monkeypatch):
    source, opened = importing.open_source(write(tmp_path / "in", VALUES | QUANTIZED)), []
    original = Mxfp4.open
    monkeypatch.setattr(Mxfp4, "open", lambda self: opened.append(self) or original(self))
    (entry,) = (e for e in source.entries if e.path == "layers/w_up")
    for expert in range(6):
        box = (slice(1, 2), slice(expert, expert + 1), slice(0, 32), slice(0, 64))
        read_box(entry, box, source.tensors.open)
    assert len(opened) == 1


NAME = EXPERTS[0]


def change(suffix: str, value):
    return lambda arrays: arrays.update({NAME + suffix: value})


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda a: a.pop(NAME + "_scales"), f"{NAME}_scales = None: must be bytes of shape"),
        (lambda a: a.pop(NAME + "_blocks"), f"{NAME}_scales = 'U8': is of bytes, and no part"),
        (change("_blocks", np.zeros((6, 128, 1, 15), "u1")), "must be of shape .*groups, 16"),
        (change("_blocks", np.zeros((6, 96, 1, 16), "u1")), "_scales = .*must be bytes of shape"),
        (change("_scales", np.zeros((6, 128, 1), "f4")), "_scales = .*must be bytes of shape"),
        (change("_extra", np.zeros(4, "u1")), f"{NAME}_extra = 'U8': is of bytes, and no part"),
    ],
)
def test_a_damaged_folder_is_refused(edit, said, tmp_path):
    folder = write(tmp_path / "in", VALUES | QUANTIZED, edit)
    with pytest.raises(ConfigError, match=said):
        importing.open_source(folder)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("gpt_oss", {"quant_method": "fp8"}),
        ("gpt_oss", "mxfp4"),
        ("mixtral", {"quant_method": "mxfp4"}),
    ],
)
def test_other_quantized_models_are_refused(name, quantization, tmp_path):
    values = tiny.MODELS[name] | {"quantization_config": quantization}
    with pytest.raises(ConfigError, match=r"quantization_config = .*is not supported"):
        importing.open_source(tiny.write_folder(tmp_path / "in", values))
