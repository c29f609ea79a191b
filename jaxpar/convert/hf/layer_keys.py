"""The keys of config.json about layers: RoPE, sliding windows, and layers of two kinds.

RoPE has two forms. In the current form, `rope_parameters` holds all values, by kind of layer if
there are two kinds. In the older form, there are `rope_theta` and `rope_scaling`, and
`rope_local_base_freq` for layers with a window. Import reads either form. Export writes both, and
readers ignore the form they do not know.
"""

import sys
from typing import Any

from jaxpar.config import ModelConfig, RopeScaling
from jaxpar.convert.hf.config_file import Values, check_kind, refuse
from jaxpar.convert.hf.families import Family

SLIDING, FULL = "sliding_attention", "full_attention"


def fields(family: Family) -> set[str]:
    """Return the fields of ModelConfig that these keys set, in a family."""
    found = {"rope_theta", "rope_scaling"}
    if family.sliding:
        found |= {"sliding_window"}
    return found | {"global_every", "local_rope_theta"} if family.two_kinds else found


def read(values: Values, family: Family, num_layers: int) -> Values:
    """Read these fields.

    Raises:   ConfigError that names the key that is not supported.
    """
    kinds = values.get("layer_types")
    if kinds is not None and family.sliding and len(kinds) != num_layers:
        rule = f"names {len(kinds)} layers, but num_hidden_layers is {num_layers}"
        raise refuse("layer_types", kinds, rule, "download the file again")
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if family.two_kinds:
        return _read_two_kinds(values, rope, num_layers)
    theta, scaling = read_rope(rope, values.get("rope_theta"))
    found = {"rope_theta": theta, "rope_scaling": scaling}
    return found | {"sliding_window": _read_alike(values, num_layers)} if family.sliding else found


def _read_two_kinds(values: Values, rope: Values, num_layers: int) -> Values:
    """Read a pattern in which every Nth layer is global; the others have another RoPE base."""
    for kind in (FULL, SLIDING):
        check_kind(f"rope_parameters {kind}", rope.get(kind), dict)
    of_all = dict(rope.get(FULL) or {}) if FULL in rope else rope
    theta, scaling = read_rope(of_all, values.get("rope_theta"))
    of_local = dict(rope.get(SLIDING) or {})
    key = "rope_local_base_freq"
    local, local_scaling = read_rope(of_local, values.get(key), key)
    if scaling is not None or local_scaling is not None:
        rule = "is a RoPE scaling that jaxpar supports only if all layers are of one kind"
        raise refuse("rope_type", "llama3", rule, "use a model with rope_type default")
    window, every = values.get("sliding_window"), values.get("sliding_window_pattern")
    kinds = values.get("layer_types")
    if kinds is not None:
        every = kinds.index(FULL) + 1 if FULL in kinds else 0
    elif every is None or every < 1:
        fix = "use the number of layers from one full layer to the next"
        raise refuse("sliding_window_pattern", every, "must be 1 or more", fix)
    pattern = [FULL if every and (i + 1) % every == 0 else SLIDING for i in range(num_layers)]
    if kinds is not None and kinds != pattern:
        rule = "is not a repeating pattern"
        raise refuse("layer_types", kinds, rule, "use a model in which every Nth layer is full")
    if window is None or set(pattern) == {FULL}:
        return {"rope_theta": theta, "rope_scaling": None, "sliding_window": None}
    alike = {"rope_theta": local, "rope_scaling": None, "sliding_window": int(window)}
    if FULL not in pattern:
        return alike
    return alike | {"rope_theta": theta, "local_rope_theta": local, "global_every": every}


def read_rope(
    rope: Values, theta: Any, key: str = "rope_theta"
) -> tuple[float, RopeScaling | None]:
    """Read the base and scaling of the rotary frequencies.

    Args:     rope: `rope_parameters`, or the older `rope_scaling`; its `rope_type` was once `type`.
              theta: the base, unless `rope` contains it. key: its key.
    """
    check_kind("rope_theta", rope.get("rope_theta"), float)
    if rope.get("rope_theta") is not None:
        theta, key = rope["rope_theta"], "rope_theta"
    theta = 10_000.0 if theta is None else theta
    if not 0 < theta <= sys.float_info.max:
        raise refuse(key, theta, "must be above 0, and finite", "download the file again")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        rule = "is not supported by jaxpar"
        raise refuse("partial_rotary_factor", rope["partial_rotary_factor"], rule, "use 1.0")
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        fix = "use a model with rope_type default or llama3"
        raise refuse("rope_type", kind, "is a RoPE scaling that jaxpar does not support", fix)
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    for key in keys:
        if not isinstance(rope.get(key), int | float):
            raise refuse(key, rope.get(key), "must be a number for rope_type llama3", "add it")
    factor, low, high, original = (rope[key] for key in keys)
    scaling = RopeScaling(
        factor=float(factor),
        low_freq_factor=float(low),
        high_freq_factor=float(high),
        original_max_position=int(original),
    )
    return float(theta), scaling


def _read_alike(values: Values, num_layers: int) -> int | None:
    """Return the sliding window if all layers have it; None if no layer has one.

    Raises:   ConfigError when only some layers have one.
    """
    window = values.get("sliding_window")
    if window is None or values.get("use_sliding_window") is False:
        return None
    kinds = values.get("layer_types")
    if kinds is None:
        full = min(values.get("max_window_layers") or 0, num_layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        rule = "applies to some layers only, which jaxpar does not support in this family"
        raise refuse("sliding_window", window, rule, "use a model with one kind of layer")
    return int(window)


def write(m: ModelConfig, family: Family) -> Values:
    """Return the keys for a model, in both forms."""
    if family.two_kinds:
        return _write_two_kinds(m)
    found = _write_rope(m)
    return found | _write_alike(m, family) if family.sliding else found


def _write_two_kinds(m: ModelConfig) -> Values:
    """Return the keys that `_read_two_kinds` reads."""
    local = m.rope_theta if m.local_rope_theta is None else m.local_rope_theta
    if m.sliding_window is None:
        kinds = [FULL] * m.num_layers
    else:
        every = m.global_every or m.num_layers + 1
        kinds = [SLIDING if (i + 1) % every else FULL for i in range(m.num_layers)]
    plain: Values = {"rope_type": "default"}
    return {
        "rope_parameters": {
            FULL: plain | {"rope_theta": m.rope_theta},
            SLIDING: plain | {"rope_theta": local},
        },
        "rope_theta": m.rope_theta,
        "rope_local_base_freq": local,
        "rope_scaling": None,
        "sliding_window": m.sliding_window,
        "sliding_window_pattern": m.global_every or m.num_layers + 1,
        "layer_types": kinds,
    }


def _write_rope(m: ModelConfig) -> Values:
    """Return the RoPE keys for a model with one kind of layer."""
    scaling: Values = {"rope_type": "default"}
    if m.rope_scaling is not None:
        s = m.rope_scaling
        scaling = {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_max_position,
        }
    older = None if m.rope_scaling is None else scaling
    return {
        "rope_parameters": scaling | {"rope_theta": m.rope_theta},
        "rope_theta": m.rope_theta,
        "rope_scaling": older,
    }


def _write_alike(m: ModelConfig, family: Family) -> Values:
    """Return the keys of a sliding window, in all forms that readers of the family expect."""
    if "use_sliding_window" not in family.defaults:
        return {"sliding_window": m.sliding_window}
    on = m.sliding_window is not None
    kind = SLIDING if on else FULL
    return {
        "use_sliding_window": on,
        "sliding_window": m.sliding_window,
        "max_window_layers": 0 if on else m.num_layers,
        "layer_types": [kind] * m.num_layers,
    }
