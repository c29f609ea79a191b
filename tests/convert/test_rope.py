"""Every kind of RoPE: read from config.json, and written again; frequencies of `transformers`."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import Attention, ConfigError
from jaxpar.convert.hf.keys.ropes import read_rope, write_rope
from jaxpar.model import rope
from jaxpar.model.plain import attention as plain_rope
from tests.convert import tiny

GOLDEN = dict(np.load(Path(__file__).parent / "goldens/rope.npz"))

#: Relative: of float32, with the error of XLA's power, and of float64 in the plain model.
TOLERANCE, PLAIN_TOLERANCE = 2e-6, 5e-7


def attention_and_length(name: str) -> tuple[Attention, int]:
    head_dim, parameters, is_long = tiny.ROPES[name]
    rope = read_rope(parameters, {}).made("halves")
    attention = Attention(num_heads=1, num_kv_heads=1, head_dim=head_dim, rope=rope)
    return attention, 10**6 if is_long else 1


@pytest.mark.parametrize("name", tiny.ROPES)
def test_frequencies_are_those_of_transformers(name):
    a, length = attention_and_length(name)
    found = rope.rope_frequencies(a.rope, a.rotary_dims, length)
    assert found.dtype == jnp.float32
    found = np.append(found, rope.attention_factor(a.rope.scaling))
    np.testing.assert_allclose(found, GOLDEN[name], rtol=TOLERANCE)


@pytest.mark.parametrize("name", tiny.ROPES)
def test_the_plain_model_has_the_same(name):
    a, length = attention_and_length(name)
    half = a.rotary_dims // 2
    found = [plain_rope.frequency(j, half, length, a.rope) for j in range(half)]
    found.append(plain_rope.rotary_factor(a.rope.scaling))
    np.testing.assert_allclose(found, GOLDEN[name], rtol=PLAIN_TOLERANCE)


@pytest.mark.parametrize("name", tiny.ROPES)
def test_what_is_written_is_read_back(name):
    found = read_rope(tiny.ROPES[name][1], {})
    assert read_rope(write_rope(found), {}) == found


def test_the_length_of_the_original_context_may_be_outside():
    """As in Phi-3's files, whose type was once named su."""
    scaling = {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}
    lengths = {"max_position_embeddings": 8192, "original_max_position_embeddings": 2048}
    found = read_rope(scaling, lengths).scaling
    assert found is not None and found.kind == "longrope"
    assert (found.factor, found.original_max_position) == (4.0, 2048)


YARN = tiny.ROPES["gpt_oss"][1]
LONGROPE = tiny.ROPES["long"][1]


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type = 'dynamic': .*use .*longrope"),
        ({"rope_type": "ntk"}, "rope_type = 'ntk': is a RoPE scaling that"),
        ({"rope_type": ["yarn"]}, r"rope_type = \['yarn'\]: is a RoPE scaling that"),
        ({"mrope_section": [8, 8]}, r"mrope_section = \[8, 8\]: is not a key of rope_type default"),
        (YARN | {"llama_4_scaling_beta": "0.1"}, "llama_4_scaling_beta = '0.1': must be a number"),
        (YARN | {"factor": None}, "factor = None: must be a number for rope_type yarn"),
        (YARN | {"beta_fast": "32"}, "beta_fast = '32': must be a number"),
        (YARN | {"truncate": 1}, "truncate = 1: must be true or false"),
        (YARN | {"attention_factor": 0}, "attention_factor = 0: must be a number above 0"),
        (YARN | {"original_max_position_embeddings": 0}, "original_max.* = 0: must be a number of"),
        (YARN | {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5: must be a number"),
        (LONGROPE | {"short_factor": 1.0}, "short_factor = 1.0: must be a list of numbers above 0"),
        (LONGROPE | {"long_factor": [1.0, 0]}, r"long_factor = \[1.0, 0\]: must be a list"),
        (
            LONGROPE | {"short_mscale": 1.2},
            "short_mscale = 1.2: is not a key of rope_type longrope",
        ),
        ({"rope_type": "linear"}, "factor = None: must be a number for rope_type linear"),
    ],
)
def test_what_cannot_be_read(rope, said):
    with pytest.raises(ConfigError, match=said):
        read_rope(rope, {})
