"""Where float8 leaves the output of norms unwritten."""

import pytest

from jaxpar.kernels.norm import Normed
from jaxpar.model import block
from tests.parity.test_float8 import lowered_step, on_mesh


@pytest.mark.parametrize(
    ("item", "fields", "unwritten"),
    [
        ("data=2", {}, True),
        ("sequence=2,zero=1", {}, True),
        ("data=2", {"model__float8_scaling": "row"}, False),
        ("data=2", {"model__matmul_dtype": "compute"}, False),
        ("tensor=2", {}, False),
        ("data=2", {"lora__rank": 2}, False),
    ],
    ids=["tensor", "sequence", "row", "float32", "tensor axis", "adapters"],
)
def test_norms_are_unwritten_where_only_rounded_matmuls_read_them(
    item, fields, unwritten, devices, monkeypatch
):
    cfg, mesh = on_mesh(item, devices, **fields)
    seen = []

    def normed_pieces(x, w, name, cfg, original=block.normed_pieces):
        x, hs = original(x, w, name, cfg)
        seen.extend((name, isinstance(h, Normed)) for h in hs)
        return x, hs

    monkeypatch.setattr(block, "normed_pieces", normed_pieces)
    lowered_step(cfg, mesh)
    assert set(seen) == {("attn_norm", unwritten), ("mlp_norm", unwritten)}
