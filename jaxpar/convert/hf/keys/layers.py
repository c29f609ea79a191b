"""The keys of config.json about layers: RoPE, sliding windows, and layers of two kinds.

RoPE has two forms. In the current form, `rope_parameters` holds all values, by kind of layer if
there are two kinds. In the older form, there are `rope_theta` and `rope_scaling`, and
`rope_local_base_freq` for layers with a window. Import reads either form. Export writes both, and
readers ignore the form they do not know. `ropes.py` has the keys of one RoPE.
"""

from typing import Any

from jaxpar.components.attention import QueryGrowth
from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Glu
from jaxpar.components.rope import Rope, RopeScaling
from jaxpar.convert.hf.composed import CannotSay, Composition, Draft, same
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

#: Most layers of a model: more would fill the memory.
MOST_LAYERS = 10_000


def read(values: Values, family: Family, num_layers: int) -> tuple[list[Draft], Values]:
    """Read what each layer is composed of.

    Returns:  the layers, and values by address.
    Raises:   ConfigError that names the key that is not supported.
    """
    if num_layers > MOST_LAYERS:
        key = family.fields["num_layers"]
        raise refuse(key, num_layers, f"must be at most {MOST_LAYERS}", CORRECT)
    if family.letters:
        return patterns.read_letters(values, num_layers), {"Attention.rope": None}
    drafts = [Draft(family.mixer, family.feed_forward) for _ in range(num_layers)]
    if family.dense_first:
        for draft in drafts[: values[family.dense_first]]:
            draft.feed_forward, draft.name = Glu, "dense_layers"
    found: Values = latents.read(values) if family.latent or family.kimi_linear else {}
    if family.kimi_linear:
        return drafts, found | kimi_linear.read(values, drafts) | {"LatentAttention.rope": None}
    if not family.rope:
        return drafts, {"Attention.rope": None}
    kinds = values.get("layer_types")
    if (
        kinds is not None
        and (family.sliding or family.nope or family.chunked or family.hybrid)
        and len(kinds) != num_layers
    ):
        rule = f"names {len(kinds)} layers, but num_hidden_layers is {num_layers}"
        raise refuse("layer_types", kinds, rule, CORRECT)
    if family.global_heads:
        global_heads.read(values, drafts)
        return drafts, {}
    if family.hybrid:
        patterns.read(values, drafts)
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if family.mrope:
        rope = ropes.without_mrope(rope, {PARTIAL: family.rope_fraction} | values)
    if family.two_ropes is not None:
        _read_two_ropes(values, rope, family.two_ropes, drafts)
        return drafts, {}
    _rotate(drafts, _read_one_rope(values, rope, family))
    if family.nope:
        _read_nope(values, drafts)
    if family.chunked:
        _read_chunks(values, drafts)
    if family.two_kinds:
        _read_windows(values, drafts)
    elif family.sliding and (window := _read_alike(values, family, num_layers)):
        _put(drafts, window=window)
    return drafts, found


def _put(drafts: list[Draft], **fields: Any) -> None:
    for draft in drafts:
        if draft.attends:
            draft.own |= fields


def _rotate(drafts: list[Draft], rope: Rope | None) -> None:
    _put(drafts, rope=rope)


def _read_one_rope(values: Values, rope: Values, family: Family) -> Rope | None:
    if family.rope_fraction is not None:
        values = {PARTIAL: family.rope_fraction} | values
    one = ropes.read_null(values) if family.null_rope else None
    one = one or read_rope(rope, values)
    if reason := why_not_rope(family, one.scaling):
        raise refuse("rope_parameters", rope, f"has {reason}", "use a model of another family")
    if family.latent:
        one = RopeKeys(one.theta, latents.with_score_factor(one.scaling, rope), one.fraction)
    if family.rope_fraction is None and not family.null_rope and one.fraction != 1:
        raise refuse(PARTIAL, one.fraction, "is not supported in this family", "use 1.0")
    return one.made(family.rope_layout)


def why_not_rope(family: Family, scaling: RopeScaling | None) -> str | None:
    """Return why a family cannot express the scaling of RoPE; None if it can."""
    kind = "default" if scaling is None else scaling.kind
    if family.ropes and kind not in family.ropes:
        return f"RoPE scaling of kind {kind}, but its models have {' or '.join(family.ropes)}"
    if scaling is not None and scaling.query_beta and not family.query_beta:
        return f"RoPE scaling with query_beta = {scaling.query_beta}, but its models have 0"
    return None


def _read_nope(values: Values, drafts: list[Draft]) -> None:
    """Read which layers have no RoPE."""
    every = _every_nope(values, len(drafts))
    for i, draft in enumerate(drafts, 1):
        if every and i % every == 0:
            draft.own["rope"] = None


def _every_nope(values: Values, num_layers: int) -> int:
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


def _read_chunks(values: Values, drafts: list[Draft]) -> None:
    """Read which layers attend within chunks, which have experts, and the growth of queries
    without RoPE."""
    size, kinds, num_layers = (
        values.get("attention_chunk_size"),
        values.get("layer_types"),
        len(drafts),
    )
    check_kind("attention_chunk_size", size, int)
    if kinds is None:
        every = _every_nope(values, num_layers)
    else:
        every = kinds.index(FULL) + 1 if FULL in kinds else 0
    pattern = [FULL if every and (i + 1) % every == 0 else CHUNKED for i in range(num_layers)]
    if kinds is not None and set(kinds) != {FULL} and kinds != pattern:
        rule = "is not a repeating pattern"
        raise refuse("layer_types", kinds, rule, "use a model in which every Nth layer is full")
    step, experts = values["interleave_moe_layer_step"], values.get("moe_layers")
    check_kind("interleave_moe_layer_step", step, int)
    if step is None or step < 1:
        raise refuse("interleave_moe_layer_step", step, "must be 1 or more", "use 1")
    with_experts = list(range(step - 1, num_layers, step))
    if experts is not None and experts != with_experts:
        rule = "is not every Nth layer, of interleave_moe_layer_step"
        raise refuse("moe_layers", experts, rule, "use a model in which it is")
    for key, kind in (("attn_scale", float), ("floor_scale", int)):
        check_kind(key, values.get(key), kind)
    tuned, beta, span = (
        values.get(key) for key in ("attn_temperature_tuning", "attn_scale", "floor_scale")
    )
    for i, (draft, attends) in enumerate(zip(drafts, pattern, strict=True)):
        if attends == CHUNKED and size is not None:
            draft.own["chunk"] = size
        if draft.own["rope"] is None and tuned and beta:
            draft.own["growth"] = QueryGrowth(beta=beta, span=span or QueryGrowth.span)
        if (i + 1) % step:
            draft.feed_forward, draft.name = Glu, "dense_layers"


def _write_chunks(of: Composition) -> Values:
    """Return the keys that `_read_chunks` reads."""
    chunk = same([a.chunk for a in of.attention if a.chunk], "chunk")
    growths = [a.growth for a in of.attention if a.rope is None]
    growth = same(growths, "growth") or QueryGrowth(beta=0.0)
    with_experts = [i for i, x in enumerate(of.layers) if isinstance(x.feed_forward, Experts)]
    if not with_experts:
        raise CannotSay("no layer has experts")
    return {
        "attention_chunk_size": chunk,
        "layer_types": [CHUNKED if a.chunk else FULL for a in of.attention],
        "attn_temperature_tuning": growth.beta > 0,
        "attn_scale": growth.beta or 0.1,
        "floor_scale": growth.span,
        "moe_layers": with_experts,
        "interleave_moe_layer_step": with_experts[0] + 1,
    }


def _read_windows(values: Values, drafts: list[Draft]) -> None:
    """Read a pattern in which every Nth layer is global, and the others have a window."""
    window, every = values.get("sliding_window"), values.get("sliding_window_pattern")
    kinds, num_layers = values.get("layer_types"), len(drafts)
    if kinds is not None:
        every = kinds.index(FULL) + 1 if FULL in kinds else 0
    elif every is None or every < 1:
        fix = "use the number of layers from one full layer to the next"
        raise refuse("sliding_window_pattern", every, "must be 1 or more", fix)
    pattern = [FULL if every and (i + 1) % every == 0 else SLIDING for i in range(num_layers)]
    if kinds is not None and kinds != pattern:
        rule = "is not a repeating pattern"
        raise refuse("layer_types", kinds, rule, "use a model in which every Nth layer is full")
    for draft, kind in zip(drafts, pattern, strict=True):
        if kind == SLIDING and window is not None:
            draft.own["window"] = int(window)


def _read_two_ropes(values: Values, rope: Values, local_key: str, drafts: list[Draft]) -> None:
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
    _read_windows(values, drafts)
    local_layers = [draft for draft in drafts if "window" in draft.own]
    both = 0 < len(local_layers) < len(drafts)
    if both and local.scaling not in (None, of_global.scaling):
        rule = f"is not that of {FULL}, and jaxpar has one RoPE scaling"
        fix = f"use a model with rope_type default in {SLIDING}"
        raise refuse(f"rope_parameters {SLIDING}", local.scaling.kind, rule, fix)
    _rotate(drafts, of_global.made("halves"))
    _rotate(local_layers, local.made("halves"))


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


def write(of: Composition, family: Family) -> Values:
    """Return the keys for a model, in both forms. Raises:   CannotSay if there are none."""
    if family.letters:
        return patterns.write_letters(of)
    if family.kimi_linear:
        return kimi_linear.write(of) | latents.write(of)
    first: Values = {}
    if family.dense_first:
        dense = [isinstance(layer.feed_forward, Glu) for layer in of.layers]
        first = {family.dense_first: sum(dense)}
        if any(dense[sum(dense) :]):
            raise CannotSay("layers with a dense feed-forward come first in its models")
    if not family.rope:
        return first
    if family.global_heads:
        return first | global_heads.write(of)
    windows = _write_windows(of) if family.two_kinds else {}
    if family.two_ropes:
        return first | windows | _write_two_ropes(of, family.two_ropes)
    found = first | windows | _write_one_rope(of, family)
    found |= latents.write(of) if family.latent else {}
    if family.nope:
        found |= _write_nope(of)
    if family.chunked:
        found |= _write_chunks(of)
    if family.hybrid:
        found |= patterns.write(of)
    return found | _write_alike(of, family) if family.sliding and not family.two_kinds else found


def _write_nope(of: Composition) -> Values:
    rotates = [int(a.rope is not None) for a in of.attention]
    every = rotates.index(0) + 1 if 0 in rotates else len(rotates) + 1
    return {"no_rope_layer_interval": every, "no_rope_layers": rotates}


def _write_windows(of: Composition) -> Values:
    """Return the keys that `_read_windows` reads."""
    kinds = [SLIDING if a.window else FULL for a in of.attention]
    every = kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1
    window = same([a.window for a in of.attention if a.window], "window")
    every = len(kinds) + 1 if window is None else every
    return {"sliding_window": window, "sliding_window_pattern": every, "layer_types": kinds}


def _write_two_ropes(of: Composition, local_key: str) -> Values:
    """Return the keys that `_read_two_ropes` reads."""
    found = [same([a.rope for a in of.attention if bool(a.window) is has], "rope")
             for has in (False, True)]  # fmt: skip
    full, local = (found[0] or found[1]), (found[1] or found[0])
    if full is None or local is None:
        raise CannotSay("its models have rotary embeddings")
    return {
        "rope_parameters": {FULL: write_rope(full), SLIDING: write_rope(local)},
        local_key: local.theta,
        "rope_theta": full.theta,
        "rope_scaling": None if full.scaling is None else write_scaling(full.scaling),
    }


def _write_one_rope(of: Composition, family: Family) -> Values:
    """Return the RoPE keys for a model in which all layers that have one have the same."""
    rope = same([a.rope for a in of.attention if a.rope], "rope")
    if rope is None and family.null_rope:
        return ropes.write_null()
    if rope is None:
        raise CannotSay("its models have rotary embeddings")
    if reason := why_not_rope(family, rope.scaling):
        raise CannotSay(reason)
    s = rope.scaling
    found: Values = {ORIGINAL: s.original_max_position} if s and s.kind == "longrope" else {}
    found |= {PARTIAL: rope.fraction} if family.rope_fraction is not None else {}
    return found | {
        "rope_parameters": write_rope(rope),
        "rope_theta": rope.theta,
        "rope_scaling": None if s is None else write_scaling(s),
    }


def _write_alike(of: Composition, family: Family) -> Values:
    """Return the keys of a sliding window, in all forms that readers of the family expect."""
    window = same([a.window for a in of.attention], "window")
    if "use_sliding_window" not in family.defaults:
        return {"sliding_window": window}
    on = window is not None
    return {
        "use_sliding_window": on,
        "sliding_window": window,
        "max_window_layers": 0 if on else len(of.layers),
        "layer_types": [SLIDING if on else FULL] * len(of.layers),
    }
