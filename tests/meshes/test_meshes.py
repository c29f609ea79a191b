"""Mesh invariance: the same weights, loss, gradients and optimizer steps on every mesh.

Each mesh is compared with the plain model of `jaxpar/model/plain` on packed documents. The
models are tiny, so compiling is nearly all of the time; LLVM's optimizations are left out of it.
"""

import functools
import math

import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import Config, QkNorm, RopeScaling, replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.axes import AXES
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from tests import weights
from tests.slow import slow, slow_but
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

BASE = replace(
    TINY,
    **{
        "model.num_layers": 4,
        "model.layers.mixer.num_heads": 8,
        "model.layers.mixer.num_kv_heads": 4,
        "optimizer.warmup_steps": 2,
        "optimizer.clip_norm": 0.5,
    },
)

#: A mesh for each code path: microbatches, a ring, chunks of stages, postponed weight gradients.
MESHES = """
data=2,tensor=2,num_microbatches=2,layer_loop=unroll,zero=2
sequence=4,context=ring
pipeline=2,num_microbatches=2,virtual_stages=2,zero=1,data=2,tensor=2,layer_loop=unroll,row_groups=2
pipeline=2,num_microbatches=4,virtual_stages=2,schedule=zero_bubble,zero=1,layer_loop=unroll
""".split()

#: What certify compares, too, and parts of what the others cover.
SLOW_MESHES = [
    *(f"{axis}=2" for axis in AXES),
    *(f"{axis}=4" for axis in AXES),
    *"""
replica=2,data=2,expert=2
data=2,num_microbatches=2,zero=1
sequence=2,tensor=2,context=ulysses,zero=1
pipeline=2,num_microbatches=4,pipeline_save=inputs
pipeline=2,num_microbatches=4,schedule=gpipe,zero=1,data=2,tensor=2,layer_loop=unroll
pipeline=4,num_microbatches=4,zero=1,tensor=2,layer_loop=unroll,remat=full
data=1
pipeline=2,data=2,sequence=2,tensor=2
data=2,tensor=2,layer_loop=unroll,row_groups=2
data=2,sequence=2
data=2,tensor=2
pipeline=2,data=2
pipeline=2,tensor=2
sequence=2,tensor=2
pipeline=2,data=2,tensor=2
replica=2,data=2
data=1,num_microbatches=4
data=2,layer_loop=unroll
data=2,tensor=2,layer_loop=unroll,zero=1
data=2,zero=2
data=2,sequence=2,num_microbatches=2,zero=2
pipeline=2,data=2,num_microbatches=4,virtual_stages=2,zero=2
pipeline=2,data=2,num_microbatches=4,layer_loop=unroll,zero=2
tensor=2,layer_loop=unroll,row_groups=4,num_microbatches=2
pipeline=2,num_microbatches=2,layer_loop=unroll,tensor=2,row_groups=2
sequence=4,context=ulysses
data=2,sequence=2,tensor=2,context=ring
pipeline=4,num_microbatches=2
pipeline=2,num_microbatches=4,virtual_stages=2
pipeline=2,num_microbatches=2,virtual_stages=2,pipeline_save=inputs,zero=1,tensor=2
pipeline=2,num_microbatches=4,virtual_stages=2,tensor=4,remat=none
pipeline=2,num_microbatches=4,zero=1,layer_loop=unroll,data=2
pipeline=2,num_microbatches=4,sequence=2,context=ring,zero=1
pipeline=4,num_microbatches=2,schedule=gpipe
pipeline=2,num_microbatches=4,schedule=gpipe,data=2,sequence=2,pipeline_save=inputs
pipeline=2,num_microbatches=4,schedule=gpipe,data=2,layer_loop=unroll,remat=full,zero=2
pipeline=2,num_microbatches=4,schedule=gpipe,zero=1,tensor=2,layer_loop=unroll,row_groups=2
pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,data=2,tensor=2,layer_loop=unroll
pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll,remat=none
pipeline=4,num_microbatches=8,schedule=zero_bubble,zero=1,layer_loop=unroll
pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,tensor=2,layer_loop=unroll,row_groups=2
pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll,pipeline_save=inputs
""".split(),
]

MIXER = "model.layers.mixer"
TIED, NORM = {"model.tie_embeddings": True}, {f"{MIXER}.qk_norm": QkNorm()}
BIASES = {f"{MIXER}.bias": True, f"{MIXER}.out_bias": True, "model.layers.feed_forward.bias": True}
ROPE_SCALING = {f"{MIXER}.rope.scaling": RopeScaling(original_max_position=16)}

VARIANTS = {
    "tied embeddings": TIED,
    "qk_norm": NORM,
    "biases": BIASES,
    "sliding window": {f"{MIXER}.window": 5},
    "rope scaling": ROPE_SCALING,
    "z_loss": {"train.z_loss": 1e-2},
    "one long document": {"data.document_mask": False},
    "as many KV heads": {f"{MIXER}.num_heads": 4},
    "eight layers": {"model.num_layers": 8},
    "all at once": TIED
    | NORM
    | BIASES
    | ROPE_SCALING
    | {f"{MIXER}.window": 9, "train.z_loss": 1e-2},
}

#: The others are in "all at once", or change less. More chunks than stages are in
#: test_unequal_stages.py, one long document in test_documents.py.
QUICK_VARIANTS = ["all at once"]

#: Where each variant is tried: tensor, sequence and FSDP sharding at once, and a pipeline.
VARIANT_MESHES = {name: "data=2,sequence=2,tensor=2" for name in VARIANTS} | {
    "tied embeddings": "pipeline=2,tensor=2,num_microbatches=2",
    # More chunks than stages: with as many, an order of layers is its own inverse.
    "eight layers": "pipeline=2,virtual_stages=4,num_microbatches=4",
    "biases": "pipeline=2,data=2,tensor=2,num_microbatches=2,zero=1",
}


@functools.cache
def batches_of(cfg: Config, steps: int):
    return [traces.random_batch(cfg, i) for i in range(max(steps, 1))]


@functools.cache
def reference_of(cfg: Config, steps: int) -> traces.TrainingTrace:
    batches = batches_of(cfg, steps)
    return (
        traces.reference_trace(cfg, batches, steps)
        if steps
        else weights.plain_gradients(cfg, batches[0])
    )


def compare(mesh_item: str, cfg: Config, devices, steps: int = 0) -> distances.Comparison:
    parallel = parse_meshes([mesh_item], cfg.parallel)[mesh_item]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    mesh, batches = make_mesh(parallel, devices[:n]), batches_of(cfg, steps)
    if steps:
        found = traces.mesh_trace(on_mesh, mesh, batches, steps)
    else:
        found = weights.first_gradients(on_mesh, mesh, batches[0])
    return distances.compare(found, reference_of(cfg, steps), TOLERANCE)


def test_the_batch_is_packed():
    batch = batches_of(BASE, 0)[0]
    assert batch.segment_ids.max() >= 3
    assert batch.positions.max() < BASE.data.seq_len - 1
    assert (batch.labels == -1).any()


@pytest.mark.parametrize("mesh", [*MESHES, *map(slow, SLOW_MESHES)])
def test_gradients(mesh, devices):
    found = compare(mesh, BASE, devices)
    assert not found.mismatches()


@pytest.mark.parametrize("variant", slow_but(QUICK_VARIANTS, VARIANTS))
def test_gradients_of_model_variants(variant, devices):
    found = compare(VARIANT_MESHES[variant], replace(BASE, **VARIANTS[variant]), devices)
    assert not found.mismatches()


#: Where the norm of all heads sums over tensor ranks: within a stage, and in row groups. Quicker:
#: the tests of test_unequal_stages.py.
NORM_MESHES = """
pipeline=2,data=2,tensor=2,num_microbatches=2,zero=1
data=2,tensor=2,layer_loop=unroll,row_groups=2
data=2,sequence=2,tensor=2
pipeline=2,tensor=2,num_microbatches=2,schedule=gpipe,layer_loop=unroll
pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,tensor=2,layer_loop=unroll
""".split()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", NORM_MESHES)
def test_gradients_with_a_norm_over_all_heads(mesh, devices):
    cfg = replace(BASE, **{f"{MIXER}.qk_norm": QkNorm(over="all")})
    assert not compare(mesh, cfg, devices).mismatches()


STEPS = 5

STEP_MESHES = """
data=2,tensor=2
replica=2,sequence=2,num_microbatches=2
pipeline=2,num_microbatches=4,virtual_stages=2,zero=1
pipeline=2,data=2,sequence=2,tensor=2
""".split()

RULES = {
    "lion": {"optimizer.name": "lion", "optimizer.learning_rate": 1e-3},
    "sgd": {"optimizer.name": "sgd", "optimizer.learning_rate": 0.1},
    "no clipping": {"optimizer.clip_norm": 0.0, "model.tie_embeddings": True},
}


def first_norm(cfg: Config) -> float:
    """Norm of the reference's first gradient."""
    return math.sqrt(sum((g**2).sum() for g in reference_of(cfg, STEPS).gradients.values()))


@pytest.mark.slow  # quicker: test_qk_clip.py, test_expert_metrics.py
@pytest.mark.parametrize("mesh", STEP_MESHES)
def test_five_steps(mesh, devices):
    assert first_norm(BASE) > 2 * BASE.optimizer.clip_norm, "nothing to clip"
    found = compare(mesh, BASE, devices, STEPS)
    assert found.update is not None and not found.mismatches()


#: Half of the distance between two bfloat16 numbers, relative.
BFLOAT16_ROUNDING = 2**-8


@pytest.mark.slow
def test_fifty_steps_of_the_fastest_layout(devices):
    """What overlaps communication ends where the plain model ends, to less than a rounding.

    Over fifty steps, Adam makes more of the first steps' rounding than over five.
    """
    fast = "data=2,tensor=2,layer_loop=unroll,row_groups=2"
    found = compare(fast, replace(BASE, **{"train.num_steps": 60}), devices, 50)
    assert found.gradient[0] <= TOLERANCE and not found.differing
    assert found.loss <= BFLOAT16_ROUNDING
    assert found.update is not None and found.update[0] <= BFLOAT16_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_five_steps_of_other_rules(rule, devices):
    found = compare("data=2,tensor=2", replace(BASE, **RULES[rule]), devices, STEPS)
    assert found.update is not None and not found.mismatches()
