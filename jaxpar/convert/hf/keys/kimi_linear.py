"""The keys of config.json about the layers of Kimi Linear: Kimi Delta Attention, or attention.

Published files have `linear_attn_config`, in which layers are counted from 1, and the number of
dense first layers. Those that `transformers` saves name each layer's mixer and feed-forward.
"""

from jaxpar.components.feed_forward import Glu
from jaxpar.components.recurrent import KimiDeltaAttention
from jaxpar.convert.hf.composed import ABSENT, CannotSay, Composition, Draft
from jaxpar.convert.hf.config_file import CORRECT, Values, check_kind, refuse
from jaxpar.convert.hf.keys import patterns

CONFIG, DENSE = "linear_attn_config", "first_k_dense_replace"

#: Fields of Kimi Delta Attention by name: keys in CONFIG, and those of `transformers`.
_SIZES = {
    "num_heads": ("num_heads", "linear_num_heads"),
    "key_head_dim": ("head_dim", "linear_head_dim"),
    "conv_kernel_size": ("short_conv_kernel_size", "linear_conv_kernel_dim"),
}

#: All keys that say what the layers are, and one that changes nothing with one group of experts.
KEYS = {CONFIG, DENSE, *(other for _, other in _SIZES.values()), "use_grouped_topk"}
KEYS |= {"layer_types", "mlp_layer_types"}

#: Keys in CONFIG with the only supported value: Kimi K3 has others.
_REQUIRED = {"gate_lower_bound": None, "use_full_rank_gate": False, "kda_layer_index_base": 1}


def read(values: Values, drafts: list[Draft]) -> Values:
    """Read the mixer and the feed-forward of each layer. Returns values by address.

    Raises:   ConfigError that names the key that is missing or not supported.
    """
    config = values.get(CONFIG) or {}
    check_kind(CONFIG, config, dict)
    for key, wanted in _REQUIRED.items():
        if config.get(key, wanted) not in (wanted, None):
            fix = f"use a model with {wanted!r}"
            raise refuse(f"{CONFIG}.{key}", config[key], "is not supported by jaxpar", fix)
    found: Values = {}
    for name, (key, other) in _SIZES.items():
        value = config.get(key, values.get(other))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            rule = "must be a whole number above 0"
            raise refuse(f"{CONFIG}.{key}", value, rule, CORRECT)
        found[f"KimiDeltaAttention.{name}"] = value
    for draft, (is_kda, is_dense) in zip(drafts, _kinds(values, config, len(drafts)), strict=True):
        if is_kda:
            draft.mixer = KimiDeltaAttention
            draft.name = "kda_dense_layers" if is_dense else "kda_layers"
            draft.feed_forward = Glu if is_dense else draft.feed_forward
    return found | {"KimiDeltaAttention.value_head_dim": found["KimiDeltaAttention.key_head_dim"]}


def check_forms(values: Values, num_layers: int) -> None:
    """Check that CONFIG says the same as the keys of `transformers` beside it.

    Raises:   ConfigError that names both.
    """
    config = values.get(CONFIG)
    if not isinstance(config, dict):
        return
    pairs = [(key, config.get(key), other, values.get(other)) for key, other in _SIZES.values()]
    named, both = values.get("layer_types"), {patterns.FULL, patterns.LINEAR}
    good = isinstance(named, list) and len(named) == num_layers and set(named) == both
    if good and config.get("kda_layers") is not None:
        pairs.append(
            (
                "kda_layers",
                _mixers({}, config, num_layers),
                "layer_types",
                _mixers(values, config, num_layers),
            )
        )
    for key, value, other, other_value in pairs:
        if None not in (value, other_value) and value != other_value:
            rule = f"contradicts {other}, another form of the same setting"
            raise refuse(f"{CONFIG}.{key}", value, rule, f"remove {other}, or correct it")
    dense, kinds_of = values.get(DENSE), values.get("mlp_layer_types")
    if not isinstance(dense, int) or not isinstance(kinds_of, list):
        return
    if len(kinds_of) != num_layers or any(kind not in ("dense", "sparse") for kind in kinds_of):
        return
    if kinds_of != ["dense" if i < dense else "sparse" for i in range(num_layers)]:
        rule = f"contradicts {DENSE} = {dense}, another form of the same setting"
        raise refuse("mlp_layer_types", str(kinds_of)[:80], rule, f"remove it, or {DENSE}")


def _kinds(values: Values, config: Values, num_layers: int) -> list[tuple[bool, bool]]:
    """Return whether each layer has Kimi Delta Attention, and a dense feed-forward."""
    mixers = _mixers(values, config, num_layers)
    dense = values.get("mlp_layer_types")
    check_kind("mlp_layer_types", dense, list)
    if dense is None:
        first = values.get(DENSE, 1)
        check_kind(DENSE, first, int)
        dense = ["dense" if i < first else "sparse" for i in range(num_layers)]
    if len(dense) != num_layers or not set(dense) <= {"dense", "sparse"}:
        rule = f"must name dense or sparse for each of num_hidden_layers = {num_layers} layers"
        raise refuse("mlp_layer_types", dense, rule, CORRECT)
    both = [(is_kda, kind == "dense") for is_kda, kind in zip(mixers, dense, strict=True)]
    if (False, True) in both:
        rule = f"makes layer {both.index((False, True)) + 1} dense, which has attention"
        rule += f" by {'full_attn_layers' if values.get('layer_types') is None else 'layer_types'}"
        raise refuse(DENSE, values.get(DENSE), rule, "use a model whose dense layers have none")
    if len(set(mixers)) < 2 or (True, False) not in both:
        rule = "must have layers with Kimi Delta Attention and experts, and layers with attention"
        raise refuse(CONFIG, config, rule, "use a model with both")
    return both


def _mixers(values: Values, config: Values, num_layers: int) -> list[bool]:
    """Return whether each layer has Kimi Delta Attention."""
    kda, full = "kda_layers", "full_attn_layers"
    named = values.get("layer_types")
    if named is not None:
        if len(named) != num_layers or not set(named) <= {patterns.LINEAR, patterns.FULL}:
            rule = f"must name {patterns.FULL} or {patterns.LINEAR} for each of {num_layers} layers"
            raise refuse("layer_types", named, rule, CORRECT)
        return [name == patterns.LINEAR for name in named]
    of_kda, of_full = (config.get(key) or [] for key in (kda, full))
    lists = isinstance(of_kda, list) and isinstance(of_full, list)
    if not lists or sorted([*of_kda, *of_full], key=str) != sorted(
        range(1, num_layers + 1), key=str
    ):
        rule = f"must have each of num_hidden_layers = {num_layers} layers once, from 1, in {kda} "
        raise refuse(CONFIG, config, f"{rule}or {full}", CORRECT)
    return [i in of_kda for i in range(1, num_layers + 1)]


def write(of: Composition) -> Values:
    """Return the keys that `read` reads, in both forms."""
    count = len(of.layers)
    full = [i for i, a in enumerate(of.mixers, 1) if not isinstance(a, KimiDeltaAttention)]
    dense = [isinstance(layer.feed_forward, Glu) for layer in of.layers]
    first = sum(dense)
    if any(dense[first:]):
        raise CannotSay("layers with a dense feed-forward come first in its models")
    config = {
        "kda_layers": [i for i in range(1, count + 1) if i not in full],
        "full_attn_layers": full,
    }
    sizes = {keys: of.one(f"KimiDeltaAttention.{name}") for name, keys in _SIZES.items()}
    if ABSENT in sizes.values():
        raise CannotSay("no layer has Kimi Delta Attention")
    config |= {key: size for (key, _), size in sizes.items()}
    return {other: size for (_, other), size in sizes.items()} | {
        CONFIG: config,
        DENSE: first,
        "layer_types": [
            patterns.FULL if i in full else patterns.LINEAR for i in range(1, count + 1)
        ],
        "mlp_layer_types": ["dense" if i < first else "sparse" for i in range(count)],
    }
