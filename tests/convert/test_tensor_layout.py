"""The tables' language: shapes, names, chunks, and copies of any box."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from jaxpar.config import ModelConfig
from jaxpar.convert.hf import tensor_layout
from jaxpar.convert.hf.entries import PHI3_LAYERS
from jaxpar.convert.hf.families import FAMILIES
from jaxpar.convert.hf.tensor_layout import Entry
from jaxpar.convert.torch_names import PLAIN
from jaxpar.sharding import grid

SIZES = tensor_layout.sizes_of(
    ModelConfig(
        num_layers=2, d_model=70, d_ff=24, num_heads=4, num_kv_heads=2, head_dim=8, num_experts=2
    )
)
WQ = Entry("layers/wq", "layer.{L}.q", "LDHK", "HK D")
EXPERT = Entry("layers/w_up", "layer.{L}.expert.{E}.up", "LEDF", "F D")


def test_what_an_entry_says():
    assert (WQ.stacked, WQ.inner) == ("L", "DHK")
    assert tensor_layout.tensor_shape(WQ, SIZES) == (32, 70)
    assert list(tensor_layout.tensor_names(WQ, SIZES)) == ["layer.0.q", "layer.1.q"]
    assert (EXPERT.stacked, EXPERT.inner) == ("LE", "DF")
    assert tensor_layout.tensor_name(EXPERT, (1, 0)) == "layer.1.expert.0.up"


@pytest.mark.parametrize("family", [*FAMILIES, PLAIN], ids=lambda family: family.model_type)
def test_every_entry_of_every_family_is_whole(family):
    assert len({(e.path, e.ours) for e in family.entries}) == len(family.entries)
    # Two layouts of a parameter may share a name; two parameters may not, unless each is a part.
    names = {(entry.name, entry.part) for entry in family.entries}
    assert len(names) == len({(entry.path, entry.name) for entry in family.entries})
    for entry in family.entries:
        dims = tensor_layout.dims_of(entry.letters)
        letters = [d[1 + entry.part] if d[0] == "[" else d for d in dims if not d.isdigit()]
        assert sorted(entry.inner) == sorted(letters)
        several = lambda d: d.isdigit() or d[0] in "[+"  # noqa: E731
        assert entry.part == 0 or any(map(several, tensor_layout.dims_of(entry.theirs)))
        assert entry.ours == entry.stacked + entry.inner
        assert all(f"{{{letter}}}" in entry.name for letter in entry.stacked)


def test_parts_of_different_sizes_follow_one_another():
    tensor = np.zeros(tensor_layout.tensor_shape(PHI3_LAYERS[4], SIZES))
    H, G, K = (SIZES[letter] for letter in "HGK")
    assert tensor.shape == ((H + 2 * G) * K, SIZES["D"])
    for entry in PHI3_LAYERS[4:7]:
        tensor_layout.as_ours(tensor, entry, SIZES)[...] += 1 + entry.part
        assert tensor_layout.chunk_shape(entry, SIZES, 2 * SIZES["D"])[1] == SIZES["D"]
    wanted = np.repeat([1.0, 2.0, 3.0], [H * K, G * K, G * K])
    np.testing.assert_array_equal(tensor, np.broadcast_to(wanted[:, None], tensor.shape))


def test_parts_that_alternate_in_a_dimension():
    gate = Entry("layers/w_gate", "layer.{L}.gate_up", "LDF", "D F2")
    up = dataclasses.replace(gate, path="layers/w_up", part=1)
    shape = tensor_layout.tensor_shape(gate, SIZES)
    assert shape == (SIZES["D"], 2 * SIZES["F"]) == tensor_layout.tensor_shape(up, SIZES)
    tensor = np.zeros(shape)
    for entry, value in ((gate, 1.0), (up, 2.0)):
        tensor_layout.as_ours(tensor, entry, SIZES)[...] = value
        chunk = tensor_layout.chunk_shape(entry, SIZES, 3 * 2 * SIZES["F"])
        assert chunk == (1, 3, SIZES["F"])
    np.testing.assert_array_equal(tensor[:, ::2], np.ones((SIZES["D"], SIZES["F"])))
    np.testing.assert_array_equal(tensor[:, 1::2], 2 * np.ones((SIZES["D"], SIZES["F"])))


@pytest.mark.parametrize("most", [1, 7, 70, 71, 500, 600, 10**6])
@pytest.mark.parametrize("entry", [WQ, EXPERT])
def test_chunks_cover_everything_once_and_are_rows_on_disk(entry, most):
    shape, chunk = (
        tensor_layout.shape_of(entry.ours, SIZES),
        tensor_layout.chunk_shape(entry, SIZES, most),
    )
    seen = np.zeros(shape, int)
    for box in grid.grid(shape, chunk):
        seen[box] += 1
        _, _, part = next(tensor_layout.tensors_in(entry, SIZES, box, lambda _: on_disk(entry)))
        rows = np.sort(np.unique(part // 70)), part.size
        assert rows[1] == len(rows[0]) * 70 or rows[1] <= 70
    assert (seen == 1).all() and np.prod(chunk) <= max(most, 1)


def on_disk(entry: Entry) -> np.ndarray:
    """A tensor whose numbers are their places."""
    shape = tensor_layout.tensor_shape(entry, SIZES)
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
