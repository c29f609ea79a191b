"""The tables' language: shapes, names, chunks, and copies of any box."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from jaxpar.convert.hf import tensor_layout
from jaxpar.convert.hf.config import family_of, model_of
from jaxpar.convert.hf.families import FAMILIES, PHI3
from jaxpar.convert.hf.names import entries_of
from jaxpar.convert.hf.tensor_layout import Entry
from jaxpar.sharding import grid
from tests.convert import tiny

SIZES = {"L": 2, "E": 2, "a": 70, "b": 4, "c": 8, "f": 24}
WQ = Entry("layers/wq", "layer.{L}.q", "Labc", "bc a", SIZES, layers=(0, 1))
EXPERT = Entry("layers/w_up", "layer.{L}.expert.{E}.up", "LEaf", "f a", SIZES, layers=(0, 1))


def test_what_an_entry_says():
    assert (WQ.stacked, WQ.inner) == ("L", "abc")
    assert tensor_layout.tensor_shape(WQ) == (32, 70)
    assert list(tensor_layout.tensor_names(WQ)) == ["layer.0.q", "layer.1.q"]
    assert (EXPERT.stacked, EXPERT.inner) == ("LE", "af")
    assert tensor_layout.tensor_name(EXPERT, (1, 0)) == "layer.1.expert.0.up"


def test_tiny_models_have_every_family():
    assert {family_of(values).model_type for values in tiny.MODELS.values()} >= {
        family.model_type for family in FAMILIES if family.model_type != "kimi_k2"
    }


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_value_of_every_tensor_is_that_of_one_parameter(name):
    values = tiny.MODELS[name]
    model = model_of(values, family_of(values))
    tensors = {name: np.zeros(shape) for name, shape in tiny.shapes(values).items()}
    entries = entries_of(family_of(values).names, model)
    assert len({entry.path for entry in entries}) == len(entries)
    for entry in entries:
        whole = tuple(slice(0, n) for n in entry.shape)
        for _, _, part in tensor_layout.tensors_in(entry, whole, tensors.__getitem__):
            part += 1
    assert {n: a for n, a in tensors.items() if not (a == 1).all()} == {}


def test_parts_of_different_sizes_follow_one_another():
    values = tiny.MODELS["phi3"]
    entries = entries_of(PHI3.names, model_of(values, PHI3))
    entries = [entry for entry in entries if "qkv_proj" in entry.name]
    H, G, K, D = 4, 2, 8, 32
    tensor = np.zeros(tensor_layout.tensor_shape(entries[0]))
    assert tensor.shape == ((H + 2 * G) * K, D)
    for entry in entries:
        tensor_layout.as_ours(tensor, entry)[...] += 1 + entry.part
        assert tensor_layout.chunk_shape(entry, 2 * D)[1] == D
    wanted = np.repeat([1.0, 2.0, 3.0], [H * K, G * K, G * K])
    np.testing.assert_array_equal(tensor, np.broadcast_to(wanted[:, None], tensor.shape))


def test_parts_that_alternate_in_a_dimension():
    gate = Entry("layers/w_gate", "layer.{L}.gate_up", "Laf", "a f2", SIZES, layers=(0, 1))
    up = dataclasses.replace(gate, path="layers/w_up", part=1)
    shape = tensor_layout.tensor_shape(gate)
    assert shape == (70, 48) == tensor_layout.tensor_shape(up)
    tensor = np.zeros(shape)
    for entry, value in ((gate, 1.0), (up, 2.0)):
        tensor_layout.as_ours(tensor, entry)[...] = value
        assert tensor_layout.chunk_shape(entry, 3 * 2 * 24) == (1, 3, 24)
    np.testing.assert_array_equal(tensor[:, ::2], np.ones((70, 24)))
    np.testing.assert_array_equal(tensor[:, 1::2], 2 * np.ones((70, 24)))


@pytest.mark.parametrize("most", [1, 7, 70, 71, 500, 600, 10**6])
@pytest.mark.parametrize("entry", [WQ, EXPERT])
def test_chunks_cover_everything_once_and_are_rows_on_disk(entry, most):
    shape, chunk = entry.shape, tensor_layout.chunk_shape(entry, most)
    seen = np.zeros(shape, int)
    for box in grid.grid(shape, chunk):
        seen[box] += 1
        _, _, part = next(tensor_layout.tensors_in(entry, box, lambda _: on_disk(entry)))
        rows = np.sort(np.unique(part // 70)), part.size
        assert rows[1] == len(rows[0]) * 70 or rows[1] <= 70
    assert (seen == 1).all() and np.prod(chunk) <= max(most, 1)


def on_disk(entry: Entry) -> np.ndarray:
    """A tensor whose numbers are their places."""
    shape = tensor_layout.tensor_shape(entry)
    return np.arange(np.prod(shape)).reshape(shape)


@pytest.mark.parametrize("shape", [(5,), (1, 1), (3, 1, 4), (300, 130), (2, 70, 3, 65)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_tiles_copy_what_assignment_copies(shape, dtype):
    rng = np.random.default_rng(0)
    for order in ([*range(len(shape))], rng.permutation(len(shape))):
        source = rng.standard_normal(shape).astype(np.float32)
        to = np.zeros([shape[i] for i in np.argsort(order)], dtype).transpose(order)
        tensor_layout.assign(to, source)
        np.testing.assert_array_equal(to, source.astype(dtype))
