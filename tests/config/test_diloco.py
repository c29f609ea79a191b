"""What DiLoCo is refused with, and the fix."""

import pytest

from jaxpar.config import ConfigError, replace
from jaxpar.config.validate import check
from tests.config.models import BASE, DELTA, EXPERTS, LAYER

GOOD = {"diloco.every": 50, "parallel.replica": 2, "model.num_layers": 8}


def test_what_may_be():
    check(replace(BASE, **GOOD))
    check(replace(BASE, **GOOD, **{"diloco.fragments": 2, "diloco.outer_dtype": "bfloat16"}))
    check(replace(BASE, **GOOD, **{"diloco.overlap": 50, "diloco.mixing": 0.0}))
    more = {"optimizer.name": "sgd", "parallel.pipeline": 2, "parallel.num_microbatches": 2}
    check(replace(BASE, **GOOD, **more))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"parallel.replica": 1}, r"replica = 1: must be at least 2 with diloco\.every = 50"),
        ({"diloco.every": 0}, r"every = 0: must be at least 1.*every 50, or --diloco None\."),
        ({"diloco.outer_learning_rate": 0.0}, r"must be above 0.*outer-learning-rate 0\.7"),
        ({"diloco.outer_momentum": 1.0}, r"must be at least 0 and below 1"),
        ({"diloco.fragments": 4}, r"fragments = 4: must divide diloco\.every = 50"),
        ({"diloco.fragments": 5}, r"must divide the 8 layers of a stage.*fragments 2"),
        (
            {"diloco.fragments": 2, "model.layers": [DELTA, LAYER] * 4},
            r"layers = 'delta_layers, layers': is not supported with diloco.fragments = 2",
        ),
        ({"diloco.overlap": -1}, r"overlap = -1: must not be negative"),
        ({"diloco.overlap": 51}, r"overlap = 51: must be at most 50, .*--diloco\.overlap 50"),
        (
            {"diloco.fragments": 2, "diloco.overlap": 26},
            r"at most 25, the steps from a fragment.*overlap 25, or --diloco\.fragments 1",
        ),
        ({"diloco.mixing": 0.2}, r"mixing = 0\.2: has no effect, because diloco\.overlap is 0"),
        ({"diloco.overlap": 2, "diloco.mixing": 1.0}, r"mixing = 1\.0: must be at least 0 and"),
        (
            {"model.layers.feed_forward": EXPERTS},
            r"forward = 'Experts': .*: loads are balanced over all replicas",
        ),
        ({"lora.rank": 4}, r"rank = 4: .*: replicas would share the frozen weights"),
        ({"optimizer.name": "muon"}, r"'muon': .*: all replicas share the work on matrices"),
        (
            {"optimizer.ema.decay": 0.9},
            r"ema.decay = 0\.9: .* do not change the weights to average",
        ),
        (
            {"optimizer.offload": True},
            r"offload = True: .*: layers are updated without",
        ),
        ({"optimizer.first_moment_dtype": "8bit"}, r"'8bit': .*: blocks have no dim"),
        ({"parallel.replica_reduction": "int8"}, r"'int8': .*: inner steps do not sum"),
        (
            {"optimizer.qk_clip": 100.0},
            r"largest logits would be those.*--diloco None",
        ),
        ({"compute.dtype": "float16"}, r"'float16': .*: all replicas have one loss scale"),
        ({"parallel.auto": ("all",)}, r"replicas change what is computed"),
        (
            {"parallel.virtual_stages": 2, "parallel.pipeline": 2, "parallel.num_microbatches": 2},
            r"virtual_stages = 2: .*: layers are stored in another order",
        ),
        (
            {"model.num_layers": 9, "parallel.pipeline": 2, "parallel.num_microbatches": 2},
            r"num_layers = 9: must be a multiple of parallel\.pipeline = 2",
        ),
    ],
)
def test_what_cannot_be(fields, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(BASE, **(GOOD | fields)))
