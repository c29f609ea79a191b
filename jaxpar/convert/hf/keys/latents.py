"""The keys of config.json about multi-head latent attention, in DeepSeek's models."""

import dataclasses
import math

from jaxpar.components.rope import RopeScaling
from jaxpar.convert.hf.composed import Composition
from jaxpar.convert.hf.config_file import CORRECT, Values, check_kind, refuse

#: The keys that are numbers in every model.
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def read(values: Values) -> Values:
    """Read the fields of a mixer.

    Raises:   ConfigError that names the key that is missing or not a number.
    """
    for key in _SIZES:
        value = values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise refuse(key, value, "must be a whole number above 0", CORRECT)
    check_kind("q_lora_rank", values.get("q_lora_rank"), int)
    sizes = (*_SIZES, "q_lora_rank")
    return {f"LatentAttention.{key}": values.get(key) for key in sizes}


def with_score_factor(s: RopeScaling | None, rope: Values) -> RopeScaling | None:
    """Add `mscale_all_dim`, which only these models apply to scores, to a scaling."""
    if s is None or s.kind != "yarn":
        return s
    return dataclasses.replace(s, mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0))


def score_keys(s: RopeScaling) -> Values:
    """Return the keys of `mscale_all_dim`.

    Readers compute the factor of cosine and sine from `mscale` too, or read `attention_factor`.
    """
    if not s.mscale_all_dim:
        return {}
    scale, of_all = s.attention_factor, 0.1 * s.mscale_all_dim * math.log(s.factor) + 1
    mscale = s.mscale_all_dim
    if scale is None:
        mscale = 0.0  # without it, the factor is that of the paper
    elif scale != 1 and s.factor > 1:
        mscale = (scale * of_all - 1) / (0.1 * math.log(s.factor))
    return {"mscale": mscale, "mscale_all_dim": s.mscale_all_dim}


def write(of: Composition) -> Values:
    """Return the keys for a model."""
    keys = ("kv_lora_rank", "q_lora_rank", *_SIZES[1:])
    return {key: of.one(f"LatentAttention.{key}") for key in keys}
