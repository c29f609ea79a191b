"""The keys of config.json about global layers with heads of their own (Gemma 4).

Their heads have two forms. `per_layer_config` has what differs in each layer, by its index. The
older keys `global_head_dim` and `num_global_key_value_heads` have it for all global layers; the
latter counts only where values are keys. Import reads either form. Export writes both.
"""

from typing import Any

from jaxpar.convert.hf.composed import CannotSay, Composition, Draft, same
from jaxpar.convert.hf.config_file import Values, check_kind, refuse
from jaxpar.convert.hf.keys.patterns import FULL, SLIDING
from jaxpar.convert.hf.keys.ropes import read_rope, write_rope

BY_LAYER, HEAD_DIM, KV_HEADS = "per_layer_config", "global_head_dim", "num_global_key_value_heads"
KEYS_AS_VALUES, BOTH_WAYS = "attention_k_eq_v", "use_bidirectional_attention"

#: All keys that are read here.
KEYS = {BY_LAYER, HEAD_DIM, KV_HEADS, KEYS_AS_VALUES, BOTH_WAYS, "layer_types"}

#: Keys that mean nothing in models that import takes: of per-layer embeddings, of layers that share
#: keys, and of experts.
UNREAD = {"vocab_size_per_layer_input", "use_double_wide_mlp", "num_experts", "top_k_experts"}
UNREAD |= {"moe_intermediate_size"}

#: Width of a global head in files without the key.
DEFAULT_HEAD_DIM = 512

#: Every which layer is global in files without `layer_types`.
EVERY = 6


def read(values: Values, drafts: list[Draft]) -> None:
    """Read the window, the heads and the rotary embedding of each layer.

    Raises:   ConfigError that names the key that is not supported.
    """
    if values.get(BOTH_WAYS) not in (None, "vision"):  # of images alone
        rule = "lets text attend to later tokens, which jaxpar does not support"
        raise refuse(BOTH_WAYS, values.get(BOTH_WAYS), rule, "use a model without it")
    kinds = _kinds(values, len(drafts))
    window, shared = values.get("sliding_window"), values.get(KEYS_AS_VALUES, False)
    for key, value, kind in (("sliding_window", window, int), (KEYS_AS_VALUES, shared, bool)):
        check_kind(key, value, kind)
    if window is None:
        raise refuse("sliding_window", window, "must be a number of tokens", "add it")
    heads = _heads(values, kinds, shared=bool(shared))
    ropes = _ropes(values)
    for draft, reach in zip(drafts, kinds, strict=True):
        draft.own["rope"] = ropes[reach]
        if reach == FULL:
            draft.own |= heads | {"keys_as_values": bool(shared)}
        else:
            draft.own["window"] = window


def write(of: Composition) -> Values:
    """Return the keys that `read` reads."""
    wide = [i for i, a in enumerate(of.mixers) if not a.is_local]
    others = [i for i in range(len(of.layers)) if i not in wide]

    def one(places: list[int], name: str) -> Any:
        return same([getattr(of.mixers[i], name) for i in places], name)

    if not wide or not others:
        raise CannotSay("its models have layers with a window, and layers without")
    if None in (one(wide, "rope"), one(others, "rope")):
        raise CannotSay("its models have rotary embeddings")
    heads = {"head_dim": one(wide, "head_dim"), "num_key_value_heads": one(wide, "num_kv_heads")}
    local, shared = of.mixers[others[0]], one(wide, "keys_as_values")
    alike = heads["num_key_value_heads"] == local.num_kv_heads and not shared
    if not alike and not shared:
        raise CannotSay("other key heads of global layers need keys_as_values in its models")
    return {
        "layer_types": [FULL if i in wide else SLIDING for i in range(len(of.layers))],
        "sliding_window": one(others, "window"),
        "head_dim": one(others, "head_dim"),
        "num_key_value_heads": one(others, "num_kv_heads"),
        HEAD_DIM: heads["head_dim"],
        KV_HEADS: None if alike else heads["num_key_value_heads"],
        BY_LAYER: {str(i): dict(heads) for i in wide},
        KEYS_AS_VALUES: shared,
        "rope_parameters": {
            FULL: write_rope(one(wide, "rope")),
            SLIDING: write_rope(one(others, "rope")),
        },
    }


def _kinds(values: Values, num_layers: int) -> list[str]:
    """Return the kind of each layer. Readers make the last one global, whatever the file says."""
    given = values.get("layer_types")
    if given is None:
        given = [SLIDING if (i + 1) % EVERY else FULL for i in range(num_layers)]
        given = [*given[:-1], FULL]
    known = isinstance(given, list) and set(given) == {SLIDING, FULL}
    if not known or len(given) != num_layers or given[-1] != FULL:
        rule = f"must name {num_layers} layers, {SLIDING} or {FULL}, some of each, the last {FULL}"
        raise refuse("layer_types", given, rule, "use a model with both kinds of layers")
    return list(given)


def _heads(values: Values, kinds: list[str], *, shared: bool) -> Values:
    """Return the fields of the heads of global layers."""
    by_layer = values.get(BY_LAYER)
    if by_layer is None:
        dim, count = values.get(HEAD_DIM, DEFAULT_HEAD_DIM), values.get(KV_HEADS)
        count = count if shared else None
    else:
        dim, count = _of_each(by_layer, kinds)
        for key, value in ((HEAD_DIM, dim), (KV_HEADS, count)):
            if None not in (value, values.get(key)) and value != values[key]:
                rule = f"contradicts {key} = {values[key]}, another form of the same setting"
                raise refuse(BY_LAYER, by_layer, rule, f"remove {key}")
    for key, value in ((HEAD_DIM, dim), (KV_HEADS, count)):
        check_kind(key, value, int)
    found = {"head_dim": dim, "num_kv_heads": count}
    return {name: value for name, value in found.items() if value is not None}


def _of_each(by_layer: Any, kinds: list[str]) -> tuple[Any, Any]:
    """Return head_dim and num_key_value_heads of the global layers, which must be alike."""
    known = {"head_dim", "num_key_value_heads"}
    wanted = {str(i) for i, kind in enumerate(kinds) if kind == FULL}
    good = isinstance(by_layer, dict) and all(isinstance(one, dict) for one in by_layer.values())
    alike = list(by_layer.values()) if good else []
    # transformers writes "05" beside "11".
    if {str(i).lstrip("0") or "0" for i in (by_layer if good else ())} != wanted or any(
        one != alike[0] or not set(one) <= known for one in alike
    ):
        rule = f"must have the same {' and '.join(sorted(known))} for each layer of {FULL}, and no "
        rule += "other layer of layer_types"
        raise refuse(BY_LAYER, by_layer, rule, "use a model with two kinds of heads")
    return alike[0].get("head_dim"), alike[0].get("num_key_value_heads")


def _ropes(values: Values) -> Values:
    """Return the rotary embeddings of both kinds of layers."""
    key, given = "rope_parameters", values.get("rope_parameters")
    check_kind(key, given, dict)
    found = given or {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
    for kind in (FULL, SLIDING):
        if not isinstance(found.get(kind), dict):
            raise refuse(f"{key} {kind}", found.get(kind), "must be a rotary embedding", "add it")
    of_global, local = (read_rope(dict(found[kind]), {}) for kind in (FULL, SLIDING))
    for kind, rope in ((FULL, of_global), (SLIDING, local)):
        if rope.fraction != 1:
            fix = "use a model with rope_type proportional"
            raise refuse(f"{key} {kind}", rope.fraction, "turns a part of each head", fix)
    if local.scaling not in (None, of_global.scaling):
        rule = f"is not that of {FULL}, and jaxpar has one RoPE scaling"
        fix = f"use a model with rope_type default in {SLIDING}"
        raise refuse(f"{key} {SLIDING}", local.scaling.kind, rule, fix)
    return {FULL: of_global.made("halves"), SLIDING: local.made("halves")}
