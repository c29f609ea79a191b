"""Every block of the model and the step is named in the program that XLA is given."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from jaxpar.config import Attention, Config, Experts, Glu, Layer, Model, replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.axes import BATCH_SPEC
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import abstract_state, state_shardings
from jaxpar.step.train_step import make_train_step
from jaxpar.tools.profiling.trace.kernels import BLOCKS, place_of

LAYER = Layer("layers", Attention(num_heads=4, num_kv_heads=2, head_dim=16), Glu(128))
SMALL = {
    "model": Model(d_model=64, vocab_size=256, layers=[LAYER] * 2),
    "data.seq_len": 64,
    "train.global_batch_size": 8,
}

SHARED = Experts(expert=Glu(128), num_experts=4, experts_per_token=2, num_shared_experts=1)
EXPERTS = set("experts router plan permute down combine weight_gradients shared_experts".split())
MUON = {"exchange_matrices", "newton_schulz"}
QK_CLIP = {"largest_logits", "qk_clip"}
DENSE = set(BLOCKS) - EXPERTS - MUON - QK_CLIP - {"adapters", "float8_scales", "between_stages"}


def scopes_in(**changes) -> set[str]:
    """The innermost block of every operation of the lowered step, on four devices."""
    cfg = resolve(replace(Config(), **SMALL, **changes), 4)
    mesh = make_mesh(cfg.parallel, jax.devices()[:4])
    abstract = lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)  # noqa: E731
    state = jax.tree.map(abstract, abstract_state(cfg), state_shardings(cfg, mesh))
    shape = cfg.train.global_batch_size, cfg.data.seq_len
    rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
    lowered = make_train_step(cfg, mesh, 4).lower(state, Batch(rows, rows, rows, rows))
    names = set(re.findall(r'loc\("([^"]*/[^"]*)"\(', lowered.as_text(debug_info=True)))
    return {place_of(name).scope.split("/")[-1] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({"parallel.tensor": 2}, DENSE),
        ({"model.layers.feed_forward": SHARED}, EXPERTS),
        (
            {"lora.rank": 4, "compute.matmul_dtype": "float8", "compute.dtype": "bfloat16"},
            {"adapters", "float8_scales"},
        ),
        (
            {"optimizer.name": "muon", "optimizer.qk_clip": 9.0, "parallel.tensor": 2},
            MUON | QK_CLIP,
        ),
        (
            {"parallel.pipeline": 2, "parallel.zero": 1, "parallel.num_microbatches": 2},
            {"between_stages", "gather_weights", "scatter_gradients"},
        ),
        ({"parallel.layer_loop": "unroll", "parallel.row_groups": 2}, DENSE),
    ],
)
def test_every_block_is_named(changes, blocks):
    assert scopes_in(**changes) >= blocks
