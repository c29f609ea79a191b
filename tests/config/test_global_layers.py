"""Settings of global layers with heads of their own that cannot work are refused, with a fix."""

import re

import pytest

from jaxpar.config import ConfigError, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.validate import check
from tests.meshes.test_global_layers import GEMMA4

PLAIN = {
    "model.layer_pattern": "",
    "model.local_rope_theta": None,
    "model.local_rope_scaling": True,
}
NONE = {"model.global_head_dim": None, "model.global_num_kv_heads": None}

CASES = [
    (PLAIN, "global_head_dim = 16: needs a layer of kind A in model.layer_pattern, which is ''"),
    (PLAIN | NONE, "global_keys_as_values = True: needs a layer of kind A"),
    ({"model.layer_pattern": "GA*", "model.num_layers": 3}, "has other layers than . and A"),
    ({"model.layer_pattern": "A"}, r"pattern = 'A': must have a layer with attention \(\*\)"),
    ({"model.sliding_window": None}, "sliding_window = None: must be a number.*window 1024"),
    ({"model.global_every": 2}, "global_every = 2: must be 0: .* has layers of kind A"),
    ({"model.nope_every": 2, "parallel.layer_loop": "unroll"}, "nope_every = 2: must be 0"),
    ({"model.global_head_dim": 15}, "global_head_dim = 15: must be even.*dim 16"),
    ({"model.global_head_dim": 0}, "global_head_dim = 0: must be at least 1"),
    ({"model.global_num_kv_heads": 3}, "num_heads = 4: must be divisible by .*kv_heads = 3"),
    ({"parallel.tensor": 4, "model.num_kv_heads": 4}, "global_num_kv_heads = 2: must be divisible"),
    (
        {"compute.attention_backend": "triton", "model.head_dim": 64, "model.global_head_dim": 512},
        "global_head_dim = 512: must be a multiple of 16 up to 256 for attention_backend = triton",
    ),
    ({"model.parallel_block": True}, "parallel_block = True: is not supported with .*pattern = "),
    ({"model.rope_scaling.turning": 0.0}, "turning = 0.0: must be above 0 and at most 1"),
    ({"model.rope_scaling.kind": "linear"}, "turning = 0.5: needs kind proportional, not linear"),
]


@pytest.mark.parametrize(("fields", "message"), CASES)
def test_one_error_with_a_fix(fields, message):
    with pytest.raises(ConfigError, match=message) as error:
        check(replace(GEMMA4, **fields))
    assert re.search(r"Fix: use --", str(error.value))


def test_a_scaled_layer_ends_with_a_feed_forward():
    fields = {"model.layer_pattern": "*-", "model.layer_scale": True}
    cfg = replace(GEMMA4, **PLAIN, **NONE, **{"model.global_keys_as_values": False})
    with pytest.raises(ConfigError, match=r"layer_scale = True: needs layers that end with a feed"):
        check(replace(cfg, **fields))


def test_a_fix_works():
    with pytest.raises(ConfigError, match=r"Fix: use --model\.global-head-dim 16") as error:
        check(replace(GEMMA4, **{"model.global_head_dim": 15}))
    (fix,) = re.findall(r"Fix: use (.*?)\.$", str(error.value))
    check(parse_overrides(GEMMA4, fix.split()))
