"""Where a layer's norms are written as they are, unscaled, or not at all."""

import jax
import pytest

from jaxpar.certification import traces
from jaxpar.execution.decisions import execution_of
from jaxpar.kernels.norm import Unmaterialized
from jaxpar.model import layer, norm
from jaxpar.step.state import abstract_state
from jaxpar.step.train_step import make_gradient_step
from tests.meshes.float8_traces import on_mesh
from tests.slow import slow
from tests.tiny import EXPERTS

COMPUTE = {"compute__matmul_dtype": "compute"}


@pytest.mark.parametrize(
    ("item", "fields", "kind"),
    [
        ("data=2", {}, "in_quantizer"),
        slow("sequence=2,zero=1", {}, "in_quantizer"),
        ("data=2", {"compute__float8_scaling": "row"}, "written"),
        slow("tensor=2", {}, "written"),
        slow("data=2", {"lora__rank": 2}, "written"),
        slow("data=2", COMPUTE, "deferred_scale"),
        ("pipeline=2,zero=1", COMPUTE | {"compute__dtype": "bfloat16"}, "deferred_scale"),
        ("data=2", COMPUTE | {"compute__dtype": "float16"}, "written"),
        slow("tensor=2", COMPUTE, "written"),
        slow("data=2", COMPUTE | {"lora__rank": 2}, "written"),
        slow("data=2", COMPUTE | {"model__layers__feed_forward__activation": "gelu"}, "written"),
        slow("data=2", COMPUTE | {"model__layers__mixer__bias": True}, "written"),
        ("data=2", COMPUTE | {"model__layers__feed_forward": EXPERTS}, "written"),
    ],
    ids=[
        *("float8", "float8, sequence", "float8, by row", "float8, tensor", "float8, adapters"),
        *("float32", "bfloat16, stages", "float16", "tensor", "adapters", "GELU", "bias"),
        "experts",
    ],
)
def test_what_matmuls_are_given_of_a_norm(item, fields, kind, devices, monkeypatch):
    cfg, mesh = on_mesh(item, devices, **fields)
    seen = []

    def norm_of_stream(x, w, name, ex, original=norm.norm_of_stream):
        x, h = original(x, w, name, ex)
        seen.append((isinstance(h.operand, Unmaterialized), h.scale is not None))
        return x, h

    monkeypatch.setattr(layer, "norm_of_stream", norm_of_stream)
    batch = jax.eval_shape(lambda: traces.random_batch(cfg))
    make_gradient_step(cfg, mesh).eval_shape(abstract_state(cfg).params, batch)
    assert execution_of(cfg).norm == kind
    assert set(seen) == {(kind == "in_quantizer", kind == "deferred_scale")}
