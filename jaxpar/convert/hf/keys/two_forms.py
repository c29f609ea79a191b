"""Settings that config.json may have in two forms: which of them counts.

A file has both forms when transformers 5 saved it and somebody added a key of transformers 4, as
model cards say to do for RoPE, or when a tool changed one of two. `settle` is called before a
family's keys are read. Where the forms say the same, either is read. Where they differ, the result
is that of transformers 5.24, or an error names both.
"""

from collections.abc import Iterator
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.convert.hf.config_file import Values, check_kind, refuse
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.keys import kimi_linear, patterns
from jaxpar.convert.hf.keys.patterns import FULL, LINEAR, SLIDING
from jaxpar.convert.hf.keys.ropes import ORIGINAL, PARTIAL, THETA, kind_of

# ---------- The kinds of layers in config.json, by name and in another form: both must say the same
#
# `layer_types` names each layer's attention. Other keys say which layers differ: every how many, or
# from which layer on.


TYPES, EVERY, INTERVAL = "layer_types", "sliding_window_pattern", "full_attention_interval"


def check(values: Values, family: Family) -> None:
    """Check that all forms of the layers' kinds say the same.

    Raises:   ConfigError that names two keys that do not.
    """
    count = values.get(family.fields["num_layers"])
    if family.letters:
        _check_letters(values)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count < 10_000:
        return
    if family.kimi_linear:
        kimi_linear.check_forms(values, count)
    elif not family.letters and family.rope and not family.global_heads:
        for key, wanted in _other_forms(values, family, count):
            if isinstance(values.get(TYPES), list):
                _compare(TYPES, values[TYPES], key, values.get(key), wanted)


def _other_forms(values: Values, family: Family, count: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the keys that also say what `layer_types` is, with what they say."""
    every = values.get(EVERY if family.two_kinds else INTERVAL)
    if family.two_kinds or family.hybrid:
        key, other = (EVERY, SLIDING) if family.two_kinds else (INTERVAL, LINEAR)
        if family.two_kinds and values.get("sliding_window", 1) is None:
            yield "sliding_window", [FULL] * count
            return
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            return
        alone = values.get(TYPES) is None and not family.reads_interval
        if alone and every != family.defaults[key]:
            rule = f"is not read in files of {family.model_type}, which have {TYPES}"
            raise refuse(key, every, rule, f"write {TYPES}, with a name for each layer")
        yield key, [other if (i + 1) % every else FULL for i in range(count)]
    elif family.sliding:
        yield from _window(values, family, count)
    elif not family.chunked:
        yield "model_type", [FULL] * count


def _window(values: Values, family: Family, count: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the key that says whether all layers have a window, and what it says.

    Where a model may have some layers with a window, `layer_types` counts, as in transformers: it
    writes its default of max_window_layers beside.
    """
    flag = "use_sliding_window"
    on = values.get("sliding_window", family.defaults.get("sliding_window")) is not None
    if flag not in family.defaults:
        yield "sliding_window", [SLIDING if on else FULL] * count
    elif not on or not values.get(flag, family.defaults[flag]):
        yield flag if on else "sliding_window", [FULL] * count


def _check_letters(values: Values) -> None:
    """Check the letters of layers, and their names."""
    for key in (patterns.NAMES, TYPES):
        letters, named = values.get(patterns.LETTERS), values.get(key)
        if isinstance(named, list) and isinstance(letters, str):
            in_letters = patterns.letters_in({patterns.NAMES: named})
            _compare(key, in_letters, patterns.LETTERS, letters, letters)


def _compare(key: str, given: Any, other: str, value: Any, wanted: Any) -> None:
    """Raises:   ConfigError if a key is there, and is not what another one says."""
    if given is None or given == wanted or len(given) != len(wanted):
        return  # another length is an error of its own
    shown = given if len(repr(given)) <= 80 else repr(given)[:77] + "..."
    rule = f"is not what {other} = {str(value)[:80]} says of the layers"
    raise refuse(key, shown, rule, f"remove the one of {key} and {other} that is wrong")


# ------------------------------------------------------------------------------- Facts in two forms


PARAMETERS, SCALING = "rope_parameters", "rope_scaling"

#: Names of one setting. A family reads one of them, which is in its `fields`.
NAMES = (
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
    ("num_shared_experts", "n_shared_experts"),
    ("norm_topk_prob", "moe_renormalize"),
    ("n_group", "num_expert_group"),
    ("num_nextn_predict_layers", "num_mtp_layers"),
    ("head_dim", "attention_head_dim"),
    ("sliding_window_pattern", "_sliding_window_pattern"),
    (THETA, "rotary_emb_base"),
    (PARTIAL, "rotary_pct"),
)

#: Keys that are another form of what a family writes, for a model that was changed.
OTHER_FORMS = {ORIGINAL, patterns.NAMES, "layer_types", "qk_head_dim"}


def names(family: Family) -> set[str]:
    """Return the other names of keys that a family reads."""
    own = {*family.fields.values(), *family.defaults}
    found = {name for same in NAMES if own & {*same} for name in same}
    return found | family.taken.keys()


def settle(values: Values, family: Family) -> Values:
    """Return the values of config.json with one form of each setting.

    Raises:   ConfigError that names both forms of a setting if they contradict each other.
    """
    check(values, family)
    values = _one_name(values, family)
    _check_heads(values, family)
    if not family.rope:
        return values
    if family.global_heads:
        _check_unread(values)
        return values
    older, current = values.get(SCALING), values.get(PARAMETERS)
    for key, rope in ((SCALING, older), (PARAMETERS, current)):
        check_kind(key, rope, dict)
        _check_type(key, rope)
    if family.two_ropes:
        rope = _two_ropes(values, family, older, current)
    else:
        rope = _one_rope(values, family, older, current)
    if not rope:
        return values
    return {key: value for key, value in values.items() if key != SCALING} | {PARAMETERS: rope}


def contradiction(key: str, value: Any, other: str, other_value: Any, fix: str = "") -> ConfigError:
    """Make the error for two keys that are forms of one setting, and differ."""
    rule = f"contradicts {other} = {_short(other_value)}, another form of the same setting"
    fix = fix or f"remove the one of {key} and {other} that is wrong"
    return refuse(key, _shown(value), rule, fix)


def _one_name(values: Values, family: Family) -> Values:
    """Rename the keys of TAKEN, and check that names of one setting have one value."""
    taken = family.taken
    for names in (*NAMES, *taken.items()):
        there = [name for name in names if values.get(name) is not None]
        for name in there[1:]:
            if values[name] != values[there[0]]:
                raise contradiction(name, values[name], there[0], values[there[0]])
        own = next((name for name in names if name in family.fields.values()), None)
        known = {own, *taken, *family.aliases}
        if own is not None and there and not known.intersection(there):
            rule = f"is {own} in files of {family.model_type}"
            raise refuse(there[0], _shown(values[there[0]]), rule, "rename it")
    renamed = {k: values[o] for o, k in taken.items() if values.get(o) is not None}
    return values | {key: value for key, value in renamed.items() if values.get(key) is None}


def _check_heads(values: Values, family: Family) -> None:
    """Check the width of heads, where other keys say it too."""
    nope, rope = values.get("qk_nope_head_dim"), values.get("qk_rope_head_dim")
    if (family.latent or family.kimi_linear) and isinstance(nope, int) and isinstance(rope, int):
        given = values.get("qk_head_dim")
        if given not in (None, nope + rope):
            key = "qk_nope_head_dim + qk_rope_head_dim"
            raise contradiction("qk_head_dim", given, key, nope + rope)
    heads = values.get(family.key("num_heads"))
    width, given = values.get(family.fields["d_model"]), values.get("head_dim")
    fixed = family.heads_alike or family.width_is_fixed
    if not (fixed and isinstance(heads, int) and isinstance(width, int) and heads > 0):
        return
    if given not in (None, width // heads):
        other = f"{family.fields['d_model']} / {family.key('num_heads')}"
        raise contradiction("head_dim", given, other, width // heads)


def _check_unread(values: Values) -> None:
    """Check keys that a family does not read, whose layers each have a RoPE."""
    if values.get(SCALING):
        rule, fix = "is not read in this family", f"write it into {PARAMETERS}"
        raise refuse(SCALING, values[SCALING], rule, fix)
    rope = values.get(PARAMETERS)
    if isinstance(rope, dict) and rope and not {FULL, SLIDING} <= rope.keys():
        raise refuse(PARAMETERS, rope, f"must have {FULL} and {SLIDING}", "write both")


def _check_type(key: str, rope: Values | None) -> None:
    """Check `rope_type`, whose older name is `type`, in one RoPE or in each of several."""
    for inner in (rope or {}, *(v for v in (rope or {}).values() if isinstance(v, dict))):
        new, old = inner.get("rope_type"), inner.get("type")
        if new is not None and old is not None and kind_of(new) != kind_of(old):
            raise contradiction(f"{key}.type", old, f"{key}.rope_type", new)


def _one_rope(
    values: Values, family: Family, older: Values | None, current: Values | None
) -> Values:
    """Return the RoPE of all layers: `rope_scaling` as a whole, if a file has both."""
    for name, inside in (older or current or {}).items():
        if isinstance(inside, dict):
            rule = f"is a RoPE of some layers, and files of {family.model_type} have one for all"
            key = SCALING if older else PARAMETERS
            raise refuse(f"{key}.{name}", inside, rule, f"write its keys as {PARAMETERS}")
    top = values | {key: values[o] for o, key in family.aliases.items() if o in values}
    if older and current and _plain(older) != _plain(current):
        for key, default in _defaults(family).items():
            left = older.get(key, top.get(key))
            if current.get(key) not in (None, default if left is None else left):
                fix = f"write {key} into {SCALING}, or remove {SCALING}"
                raise contradiction(f"{PARAMETERS}.{key}", current[key], SCALING, older, fix)
    rope, key = (older, SCALING) if older else (current or {}, PARAMETERS)
    for name in (THETA, PARTIAL):
        for other in (name, *(o for o, k in family.aliases.items() if k == name)):
            _check_inside(values, name, rope, key, other)
        others = [o for o, k in family.aliases.items() if k == name]
        alone = others and name not in rope and values.get(others[0]) is None
        if alone and values.get(name) not in (None, _defaults(family)[name]):
            rule = f"is {others[0]} in files of {family.model_type}"
            raise refuse(name, values[name], rule, "rename it")
    _check_original(values, family, rope, key)
    return rope


def _check_inside(values: Values, name: str, rope: Values, key: str, other: str = "") -> None:
    """Check a key of a RoPE that stands beside it, too, where it may have another name."""
    beside = values.get(other or name)
    if name in rope and beside is not None and rope[name] != beside:
        raise contradiction(other or name, beside, f"{key}.{name}", rope[name])


def _check_original(values: Values, family: Family, rope: Values, key: str) -> None:
    """Check the length of the original context, which LongRoPE may have beside its other keys."""
    _check_inside(values, ORIGINAL, rope, key)
    beside, most = values.get(ORIGINAL), values.get("max_position_embeddings")
    scaled = kind_of(rope.get("rope_type", rope.get("type"))) in ("llama3", "yarn")
    alone = scaled and ORIGINAL not in rope and ORIGINAL not in family.defaults
    if alone and beside not in (None, most):
        rule = f"is read only within {key} in files of {family.model_type}"
        raise refuse(ORIGINAL, beside, rule, f"write it into {key}")


def _defaults(family: Family) -> Values:
    fraction = family.rope_fraction
    theta = family.defaults.get(THETA, 10_000.0)
    return {THETA: theta, PARTIAL: 1.0 if fraction is None else fraction}


def _plain(rope: Values) -> Values:
    """Return a RoPE with the current names, and without keys that say nothing."""
    kept = {key: value for key, value in rope.items() if value is not None and key != "type"}
    return kept | {"rope_type": kind_of(rope.get("rope_type", rope.get("type")))}


def _two_ropes(
    values: Values, family: Family, older: Values | None, current: Values | None
) -> Values:
    """Return the RoPE of each kind of layers. `rope_scaling` adds to that of full attention."""
    if current and not {FULL, SLIDING} & current.keys():
        rule = f"must have {FULL} and {SLIDING} in this family"
        raise refuse(PARAMETERS, _shown(current), rule, f"write it as {FULL}")
    if older and {FULL, SLIDING} & older.keys():
        rule = f"has {FULL} or {SLIDING}, which only {PARAMETERS} may have"
        raise refuse(SCALING, _shown(older), rule, f"name it {PARAMETERS}")
    rope = {kind: (current or {}).get(kind) or {} for kind in (FULL, SLIDING)}
    for kind, one in rope.items():
        check_kind(f"{PARAMETERS} {kind}", one, dict)
    if older and "rope_type" not in older and kind_of(older.get("type")) != "default":
        rule = f"needs rope_type in this family, not type alone, beside {PARAMETERS}"
        raise refuse(SCALING, _shown(older), rule, "rename type to rope_type")
    rope[FULL] = rope[FULL] | (older or {})
    local = family.two_ropes or THETA
    _check_inside(values, THETA, rope[FULL], f"{PARAMETERS}.{FULL}")
    inside, beside = rope[SLIDING].get(THETA), values.get(local)
    if local != THETA and None not in (inside, beside) and inside != beside:
        raise contradiction(local, beside, f"{PARAMETERS}.{SLIDING}.{THETA}", inside)
    for one in rope.values():
        _check_original(values, family, one, PARAMETERS)
    base = _defaults(family)[THETA]
    if local == THETA and inside is None and beside not in (None, base):
        rule = f"is the base in layers of {FULL} alone: transformers 5 takes {base} in the others"
        raise refuse(THETA, beside, rule, f"write both bases, as {PARAMETERS}")
    return rope if older or current else {}


def _shown(value: Any) -> Any:
    """Return a value for an error: long lists and objects shortened."""
    return value if len(repr(value)) <= 80 else _short(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
