"""The keys of config.json about layers: RoPE, sliding windows, and layers of two kinds.

RoPE has two forms. In the current form, `rope_parameters` holds all values, by kind of layer if
there are two kinds. In the older form, there are `rope_theta` and `rope_scaling`, and
`rope_local_base_freq` for layers with a window. Import reads either form. Export writes both, and
readers ignore the form they do not know. `ropes.py` has the keys of one RoPE.
"""

from jaxpar.config import ModelConfig, RopeScaling
from jaxpar.config.layout.layer_kinds import dense_places
from jaxpar.convert.hf.config_file import CORRECT, Values, check_kind, refuse
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.keys import global_heads, kimi_linear, latents, patterns, ropes
from jaxpar.convert.hf.keys.patterns import FULL, SLIDING
from jaxpar.convert.hf.keys.ropes import (
    ORIGINAL,
    PARTIAL,
    RopeKeys,
    read_rope,
    write_rope,
    write_scaling,
)

CHUNKED = "chunked_attention"


def fields(family: Family) -> set[str]:
    """Return the fields of ModelConfig that these keys set, in a family."""
    if family.kimi_linear:
        return {*kimi_linear.FIELDS, *latents.FIELDS}
    if not family.rope:
        return {"layer_pattern"} if family.letters else set()
    if family.global_heads:
        return set(global_heads.FIELDS)
    found = {"rope_theta", "rope_scaling"} | ({*latents.FIELDS} if family.latent else set())
    if family.rope_fraction is not None or family.null_rope:
        found |= {"rope_fraction"}
    if family.nope:
        found |= {"nope_every"}
    if family.chunked:
        found |= {"attention_chunk", "global_every", "nope_query_beta", "nope_query_span"}
        found |= {"qk_norm_gain", "dense_layers"}
    if family.hybrid:
        found |= {"layer_pattern"}
    if family.sliding:
        found |= {"sliding_window"}
    if family.two_kinds:
        found |= {"global_every"}
    return found | {"local_rope_theta", "local_rope_scaling"} if family.two_ropes else found


def read(values: Values, family: Family, num_layers: int) -> Values:
    """Read these fields.

    Raises:   ConfigError that names the key that is not supported.
    """
    if family.letters:
        return {"layer_pattern": patterns.read_letters(values, family.letters, num_layers)}
    if family.kimi_linear:
        return kimi_linear.read(values, num_layers) | latents.read(values)
    if not family.rope:
        return {}
    kinds = values.get("layer_types")
    if (
        kinds is not None
        and (family.sliding or family.nope or family.chunked or family.hybrid)
        and len(kinds) != num_layers
    ):
        rule = f"names {len(kinds)} layers, but num_hidden_layers is {num_layers}"
        raise refuse("layer_types", kinds, rule, CORRECT)
    if family.global_heads:
        return global_heads.read(values, num_layers)
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if family.mrope:
        rope = ropes.without_mrope(rope, {PARTIAL: family.rope_fraction} | values)
    if family.two_ropes is not None:
        return _read_two_ropes(values, rope, family.two_ropes, num_layers)
    if family.rope_fraction is not None:
        values = {PARTIAL: family.rope_fraction} | values
    one = ropes.read_null(values) if family.null_rope else None
    one = one or read_rope(rope, values)
    if reason := why_not_rope(family, one.scaling):
        raise refuse("rope_parameters", rope, f"has {reason}", "use a model of another family")
    found: Values = {"rope_theta": one.theta, "rope_scaling": one.scaling}
    if family.latent:
        found |= latents.read(values)
        found["rope_scaling"] = latents.with_score_factor(one.scaling, rope)
    if family.rope_fraction is not None or family.null_rope:
        found["rope_fraction"] = one.fraction
    elif one.fraction != 1:
        raise refuse(PARTIAL, one.fraction, "is not supported in this family", "use 1.0")
    if family.nope:
        found["nope_every"] = _read_nope(values, num_layers)
    if family.chunked:
        found |= _read_chunks(values, num_layers, found["nope_every"])
    if family.hybrid:
        found["layer_pattern"] = patterns.read(values, num_layers)
    if family.two_kinds:
        return found | _read_windows(values, num_layers)
    if family.sliding:
        found["sliding_window"] = _read_alike(values, family, num_layers)
    return found


def why_not_rope(family: Family, scaling: RopeScaling | None) -> str | None:
    """Return why a family cannot express the scaling of RoPE; None if it can."""
    kind = "default" if scaling is None else scaling.kind
    if family.ropes and kind not in family.ropes:
        return f"model.rope_scaling of kind {kind}, but its models have {' or '.join(family.ropes)}"
    if scaling is not None and scaling.query_beta and not family.query_beta:
        return f"model.rope_scaling.query_beta = {scaling.query_beta}, but its models have 0"
    return None


def _read_nope(values: Values, num_layers: int) -> int:
    """Return every which layer has no RoPE, from a list with 1 for each layer that has it."""
    key, every = "no_rope_layers", values.get("no_rope_layer_interval")
    check_kind("no_rope_layer_interval", every, int)
    given = values.get(key)
    if given is None or given == []:
        every = every or 0
        return every if 0 < every <= num_layers else 0
    without = [i + 1 for i, has in enumerate(given) if not has] if isinstance(given, list) else None
    if without is None or len(given) != num_layers:
        rule = f"must be a list of num_hidden_layers = {num_layers} numbers, 0 or 1"
        raise refuse(key, given, rule, CORRECT)
    if not without:
        return 0
    if without != list(range(without[0], num_layers + 1, without[0])):
        fix = "use a model in which every Nth layer has no RoPE"
        raise refuse(key, given, "is not a repeating pattern", fix)
    return without[0]


def _read_chunks(values: Values, num_layers: int, nope_every: int) -> Values:
    """Read which layers attend within chunks, and the growth of queries without RoPE.

    Args:     nope_every: from `_read_nope`.
    """
    size, kinds = values.get("attention_chunk_size"), values.get("layer_types")
    check_kind("attention_chunk_size", size, int)
    if kinds is None:
        every = nope_every
    else:
        every = kinds.index(FULL) + 1 if FULL in kinds else 0
    pattern = [FULL if every and (i + 1) % every == 0 else CHUNKED for i in range(num_layers)]
    if kinds is not None and set(kinds) != {FULL} and kinds != pattern:
        rule = "is not a repeating pattern"
        raise refuse("layer_types", kinds, rule, "use a model in which every Nth layer is full")
    if size is None or every == 1:
        size, every = None, 0
    step, experts = values["interleave_moe_layer_step"], values.get("moe_layers")
    check_kind("interleave_moe_layer_step", step, int)
    if step < 1:
        raise refuse("interleave_moe_layer_step", step, "must be 1 or more", "use 1")
    with_experts = list(range(step - 1, num_layers, step))
    if experts is not None and experts != with_experts:
        rule = "is not every Nth layer, of interleave_moe_layer_step"
        raise refuse("moe_layers", experts, rule, "use a model in which it is")
    found: Values = {"attention_chunk": size, "global_every": every}
    found |= {"dense_layers": num_layers - len(with_experts)}
    found["qk_norm_gain"] = not values["use_qk_norm"]
    if not values.get("attn_temperature_tuning") or not nope_every:
        return found
    for key, kind in (("attn_scale", float), ("floor_scale", int)):
        check_kind(key, values.get(key), kind)
    grown = {"nope_query_beta": values["attn_scale"], "nope_query_span": values["floor_scale"]}
    return found | grown


def _write_chunks(m: ModelConfig) -> Values:
    """Return the keys that `_read_chunks` reads."""
    every = m.global_every or m.num_layers + 1
    kinds = [CHUNKED if (i + 1) % every else FULL for i in range(m.num_layers)]
    return {
        "attention_chunk_size": m.attention_chunk,
        "layer_types": [FULL] * m.num_layers if m.attention_chunk is None else kinds,
        "attn_temperature_tuning": m.nope_query_beta > 0,
        "attn_scale": m.nope_query_beta or 0.1,
        "floor_scale": m.nope_query_span,
        "moe_layers": [i for i in range(m.num_layers) if i not in dense_places(m)],
    }


def _read_windows(values: Values, num_layers: int) -> Values:
    """Read a pattern in which every Nth layer is global, and the others have a window."""
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
        return {"sliding_window": None, "global_every": 0}
    return {"sliding_window": int(window), "global_every": every if FULL in pattern else 0}


def _read_two_ropes(values: Values, rope: Values, local_key: str, num_layers: int) -> Values:
    """Read global layers and layers with a window, each kind with its RoPE.

    Args:     local_key: of the base in layers with a window, in the older form.
    """
    for kind in (FULL, SLIDING):
        check_kind(f"rope_parameters {kind}", rope.get(kind), dict)
    by_kind = FULL in rope or SLIDING in rope
    of_global = read_rope(dict(rope.get(FULL) or {}) if by_kind else rope, values)
    local = read_rope(dict(rope.get(SLIDING) or {}), values, local_key)
    if of_global.fraction != 1 or local.fraction != 1:
        raise refuse(PARTIAL, of_global.fraction, "is not supported in this family", "use 1.0")
    found = _read_windows(values, num_layers)
    every, window = found["global_every"], found["sliding_window"]
    if not every:
        one = of_global if window is None else local
        alike: Values = {"rope_theta": one.theta, "rope_scaling": one.scaling}
        return alike | {"sliding_window": window}
    if local.scaling not in (None, of_global.scaling):
        rule = f"is not that of {FULL}, and jaxpar has one RoPE scaling"
        fix = f"use a model with rope_type default in {SLIDING}"
        raise refuse(f"rope_parameters {SLIDING}", local.scaling.kind, rule, fix)
    found |= {"rope_theta": of_global.theta, "rope_scaling": of_global.scaling}
    found["local_rope_scaling"] = local.scaling == of_global.scaling
    return found | {"local_rope_theta": local.theta}


def _read_alike(values: Values, family: Family, num_layers: int) -> int | None:
    """Return the sliding window if all layers have it; None if no layer has one.

    Raises:   ConfigError when only some layers have one.
    """
    window, flag = values.get("sliding_window"), "use_sliding_window"
    if window is None or (flag in family.defaults and values[flag] is False):
        return None
    kinds = values.get("layer_types")
    if flag not in family.defaults:  # all layers are alike
        kinds = kinds or [SLIDING] * num_layers
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
    if family.letters:
        return patterns.write_letters(m)
    if family.kimi_linear:
        return kimi_linear.write(m) | latents.write(m)
    if not family.rope:
        return {}
    if family.global_heads:
        return global_heads.write(m)
    windows = _write_windows(m) if family.two_kinds else {}
    if family.two_ropes:
        return windows | _write_two_ropes(m, family.two_ropes)
    found = windows | _write_one_rope(m) | (latents.write(m) if family.latent else {})
    if family.rope_fraction is not None:
        found[PARTIAL] = m.rope_fraction
    if family.nope:
        found |= _write_nope(m)
    if family.chunked:
        found |= _write_chunks(m)
    if family.hybrid:
        found |= patterns.write(m)
    return found | _write_alike(m, family) if family.sliding and not family.two_kinds else found


def _write_nope(m: ModelConfig) -> Values:
    every = m.nope_every or m.num_layers + 1
    return {
        "no_rope_layer_interval": every,
        "no_rope_layers": [int((i + 1) % every != 0) for i in range(m.num_layers)],
    }


def _write_windows(m: ModelConfig) -> Values:
    """Return the keys that `_read_windows` reads."""
    every = m.global_every or m.num_layers + 1
    kinds = [SLIDING if (i + 1) % every else FULL for i in range(m.num_layers)]
    return {
        "sliding_window": m.sliding_window,
        "sliding_window_pattern": every,
        "layer_types": [FULL] * m.num_layers if m.sliding_window is None else kinds,
    }


def _write_two_ropes(m: ModelConfig, local_key: str) -> Values:
    """Return the keys that `_read_two_ropes` reads."""
    theta = m.rope_theta if m.local_rope_theta is None else m.local_rope_theta
    local = RopeKeys(theta, m.rope_scaling if m.local_rope_scaling else None, 1.0)
    return {
        "rope_parameters": {
            FULL: write_rope(RopeKeys(m.rope_theta, m.rope_scaling, 1.0)),
            SLIDING: write_rope(local),
        },
        local_key: local.theta,
        "rope_theta": m.rope_theta,
        "rope_scaling": None if m.rope_scaling is None else write_scaling(m.rope_scaling),
    }


def _write_one_rope(m: ModelConfig) -> Values:
    """Return the RoPE keys for a model in which all layers have the same."""
    if m.rope_fraction == 0:
        return ropes.write_null()
    s = m.rope_scaling
    beside = {ORIGINAL: s.original_max_position} if s and s.kind == "longrope" else {}
    return beside | {
        "rope_parameters": write_rope(RopeKeys(m.rope_theta, s, m.rope_fraction)),
        "rope_theta": m.rope_theta,
        "rope_scaling": None if s is None else write_scaling(s),
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
