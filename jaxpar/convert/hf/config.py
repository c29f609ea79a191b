"""Converts the config.json of a published model to a composed `Model`, and back.

A key that makes the model compute something jaxpar does not support is refused by name. Keys that
do not affect the function (token ids, dropout, initial values) are accepted, and kept for export.
"""

import typing
from typing import Any, Literal

from jaxpar.components.component import FeedForward
from jaxpar.components.experts import Experts, experts_in
from jaxpar.config import ConfigError, Model
from jaxpar.config.rules.experts import without_router_gradient
from jaxpar.convert.hf.composed import (
    ABSENT,
    CannotSay,
    Composition,
    build,
    canonical,
    difference,
    hint_of,
    norm_of,
)
from jaxpar.convert.hf.config_file import CORRECT, Values, refuse
from jaxpar.convert.hf.families import FAMILIES
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.float8_blocks import is_float8_blocks
from jaxpar.convert.hf.keys import experts, layers, patterns, two_forms
from jaxpar.convert.hf.keys.known import REQUIRED
from jaxpar.convert.hf.names import entries_of, unnamed
from jaxpar.convert.hf.tensor_layout import Entry

#: Compute dtype of the model, by dtype of the weights.
COMPUTE_DTYPES: dict[str, Literal["bfloat16", "float32"]] = {
    "bfloat16": "bfloat16",
    "float16": "bfloat16",
    "float32": "float32",
}

#: Fields of the model that a published config.json does not determine.
FREE_MODEL_FIELDS = {
    "init_std",
}

#: How weights are quantized. Exported ones are not.
QUANTIZATION = "quantization_config"


def family_of(values: Values) -> Family:
    """Return the family of a config.json.

    Raises:   ConfigError for an unsupported architecture.
    """
    known: dict[str, Family] = {}
    for family in FAMILIES:
        if family.architecture not in known or family.model_type == values.get("model_type"):
            known[family.architecture] = family
    names = values.get("architectures") or []
    if not names:
        names = [f.architecture for f in FAMILIES if f.model_type == values.get("model_type")]
    if len(names) == 1 and names[0] in known:
        return known[names[0]]
    shown = names or values.get("model_type")
    if isinstance(values.get("text_config"), dict):
        rule = "reads images or sound, too, which jaxpar does not support"
        fix = "save its text part as a folder of its own (docs/convert.md)"
        raise refuse("architectures", shown, rule, fix)
    raise refuse(
        "architectures",
        shown,
        "is not an architecture that jaxpar supports",
        f"use one of {', '.join(known)}",
    )


def named_family(model_type: str, option: str = "--family") -> Family:
    """Return the family with a `model_type`.

    Args:     option: for errors.
    Raises:   ConfigError for an unknown one.
    """
    found = next((family for family in FAMILIES if family.model_type == model_type), None)
    if found is None:
        fix = f"use one of {', '.join(f.model_type for f in FAMILIES)}"
        raise ConfigError(option, model_type, "is not a family that jaxpar supports", fix)
    return found


# ------------------------------------------------------------------------------------ reading


def model_of(values: Values, family: Family) -> Model:
    """Convert a config.json to a Model.

    Raises:   ConfigError that names the key that is missing or unsupported.
    """
    values = _with_defaults(values, family)
    for key, wanted in (REQUIRED | family.required).items():
        own = {*family.fields.values(), *family.defaults} - family.required.keys()
        if key in own:
            continue
        found = values.get(key, wanted)
        if key == QUANTIZATION and family.mxfp4 and _is_mxfp4(found):
            continue
        if key == QUANTIZATION and family.float8_blocks and is_float8_blocks(found):
            continue
        if found != wanted and found is not None:
            raise refuse(key, found, "is not supported by jaxpar", f"use a model with {wanted!r}")
    shared: Values = dict(family.fixed)
    for address, key in family.fields.items():
        shared[address] = _field(address, key, values, family)
    if family.dense_first:
        values[family.dense_first] = _number(family.dense_first, values, least=0)
    if family.heads_alike:
        heads = shared["Attention.num_heads"]
        shared["Attention.num_kv_heads"] = heads
        shared["Attention.head_dim"] = shared["d_model"] // max(heads, 1)
    shared |= {address: shared[other] for address, other in family.equal.items()}
    for key, other in family.equal_keys.items():
        if values.get(key) not in (None, values.get(other)):
            rule = f"must be {other} = {values.get(other)}, which jaxpar has one field for"
            raise refuse(key, values.get(key), rule, "use a model in which they are equal")
    drafts, found = layers.read(values, family, shared.pop("num_layers"))
    shared |= found
    if any(draft.feed_forward is Experts for draft in drafts):
        shared |= experts.read(values, family, shared["Experts.expert.d_ff"])
    top = {name: value for name, value in shared.items() if "." not in name}
    model = Model(layers=build(drafts, shared), norm=norm_of(shared), **top)
    if without_router_gradient(model) is not None:
        rule = "gives each token one expert, with a weight of 1: the router could not be trained"
        fix = "use a model with at least 2, or without norm_topk_prob"
        raise refuse(family.fields["Experts.experts_per_token"], 1, rule, fix)
    return model


def _is_mxfp4(quantization: Any) -> bool:
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def _with_defaults(values: Values, family: Family) -> Values:
    """Add the family's defaults for missing keys, and resolve aliases and settings in two forms.

    Raises:   ConfigError that names two forms of a setting that contradict each other.
    """
    values = two_forms.settle(values, family)
    if values.get(two_forms.PARAMETERS) is None:
        values = {key: value for key, value in values.items() if key != two_forms.PARAMETERS}
    renamed = {key: values[other] for other, key in family.aliases.items() if other in values}
    if family.letters and isinstance(values.get(patterns.NAMES), list):
        renamed["num_hidden_layers"] = len(values[patterns.NAMES])
    return family.defaults | renamed | values


def check_count(values: Values, family: Family, num_tensors: int) -> None:
    """Check that there is at least one tensor for each layer and each expert.

    Otherwise, a damaged config.json could make the names of tensors fill the memory.

    Raises:   ConfigError that names the key that requires more tensors than there are.
    """
    values, wanted = _with_defaults(values, family), 1
    letters = (patterns.letters_in(values) or "") if family.letters else ""
    with_experts = letters.count(patterns.EXPERTS)
    for ours in ("num_layers", "num_experts"):
        key = family.key(ours)
        count = values.get(key)
        none = letters and not with_experts
        if ours == "num_experts" and (none or not family.names.of_each_expert):
            break  # there are none, or a tensor has all of them
        if ours == "num_layers" and with_experts:
            count = with_experts
        elif ours == "num_layers" and isinstance(count, int):
            dense = values.get(family.dense_first, 0)
            count -= dense if isinstance(dense, int) else 0
        wanted *= max(count, 1) if isinstance(count, int) else 1
        if wanted > num_tensors:
            rule = f"asks for more tensors than the {num_tensors} in the files"
            raise refuse(key, count, rule, "use the config.json of these files")


def _field(address: str, key: str, values: Values, family: Family) -> Any:
    """Return the value at an address; for keys missing in old files, the default of
    `transformers`."""
    name = address.rpartition(".")[2]
    values = {**values}
    if values.get(key) is None and name == "head_dim":
        return values["hidden_size"] // max(values["num_attention_heads"], 1)
    if values.get(key) is None and key == "n_inner":  # GPT-2
        return 4 * values["n_embd"]
    if values.get(key) is None and name == "num_kv_heads":
        values[key] = values.get("num_attention_heads")
    if values.get(key) is None and name == "tie_embeddings":
        return False
    if address in family.switches:
        on, off = family.switches[address]
        return on if _checked(key, values, bool) else off
    hint, default = hint_of(address)
    options = (hint, *typing.get_args(hint))
    if values.get(key) is None and float in options and type(None) in options:
        return None
    kind = next(one for one in (bool, int, float) if one in options)
    if kind is int:
        return _number(key, values, least=0 if default == 0 or default is None else 1)
    return _checked(key, values, kind)


def _checked(key: str, values: Values, kind: type) -> Any:
    value = values.get(key)
    good = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not good or isinstance(value, bool) is not (kind is bool):
        raise refuse(key, value, f"must be {kind.__name__}", CORRECT)
    return value


def _number(key: str, values: Values, *, least: int) -> int:
    value: int = _checked(key, values, int)
    if value < least:
        raise refuse(key, value, f"must be {least} or more", CORRECT)
    return value


def dtype_of(values: Values) -> str:
    """Return the dtype of the weights in config.json; float32 if it is not specified."""
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    if dtype not in COMPUTE_DTYPES:
        raise refuse("dtype", dtype, "is not a dtype that jaxpar reads", "use bfloat16 weights")
    return dtype


# ------------------------------------------------------------------------------------ writing


def why_not(family: Family, m: Model) -> str | None:
    """Return why a family cannot express a model, naming the field; None if it can.

    It can if reading what is written gives the model back.
    """
    try:
        values = _written(family, m)
    except CannotSay as reason:
        return str(reason)
    of = Composition(m)
    for address, least in family.at_least.items():
        if (value := of.one(address)) is not ABSENT and value < least:
            return f"{address} = {value}, but its models have at least {least}"
    for address in family.given:
        if of.one(address) is None:
            return f"{address} = None, but its models have a number"
    try:
        back = model_of(values | {"dtype": "float32"}, family)
    except ConfigError as error:
        return f"{error.field} would be {error.value!r}, which {error.rule}"
    if found := difference(m, back):
        return str(found)
    wide = [a.num_heads * a.head_dim for a in of.attention]
    if family.heads_fill_model and any(width != m.d_model for width in wide):
        return f"num_heads * head_dim = {wide[0]}, but its models have d_model, {m.d_model}"
    missing = unnamed(family.names, m)
    return f"no tensor for {', '.join(missing)}" if missing else None


def choose_family(m: Model) -> Family:
    """Return the first family that can express a model, among those with experts or without.

    Raises:   ConfigError with a reason for each of these families, if none can.
    """
    has_experts = bool(experts_in(m))
    alike = [f for f in FAMILIES if has_experts in _may_have_experts(f)]
    reasons = {family.model_type: why_not(family, m) for family in alike}
    for family in alike:
        if reasons[family.model_type] is None:
            return family
    rule = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    fix = "export it with `to-torch`, or train a model of one of them"
    raise ConfigError("RUN", "its model", f"fits no published family ({rule})", fix)


def _may_have_experts(family: Family) -> set[bool]:
    forwards = [family.feed_forward, *(c for c in family.others if issubclass(c, FeedForward))]
    return {cls is Experts for cls in forwards}


def config_json(m: Model, family: Family, carried: Values, dtype: str) -> Values:
    """Make the config.json of a model.

    A file that describes the model is kept as it is, but for the dtype. Any other contains RoPE in
    the current and in the older form; readers ignore the form they do not know.

    Args:     carried: values to keep unless the model's fields set them: those of the folder that
              it was imported from. dtype: of the weights on disk.
    """
    if describes(carried, family, m):
        kept = {key: value for key, value in carried.items() if key != QUANTIZATION}
        return kept | {key: dtype for key in dtype_keys(kept)}
    own = _written(family, m) | {"dtype": dtype, "torch_dtype": dtype}
    dropped = {QUANTIZATION} | two_forms.names(family) | two_forms.OTHER_FORMS
    if "max_positions" in family.fields:  # transformers would take it for that field
        dropped.add("max_position_embeddings")
    return {key: value for key, value in carried.items() if key not in dropped} | own


def _written(family: Family, m: Model) -> Values:
    """Return the keys of a model. Raises:   CannotSay."""
    of = Composition(m)
    terms = {family.mixer, family.feed_forward, *family.others, type(None)}
    for layer in of.layers:
        for role, term in (("mixer", layer.mixer), ("feed_forward", layer.feed_forward)):
            if type(term) not in terms:
                what = "None" if term is None else type(term).__name__
                known = ", ".join(sorted(cls.__name__ for cls in terms - {type(None)}))
                raise CannotSay(f"model.{layer.name}.{role} is {what}, but its models have {known}")
    by_layer = layers.write(of, family) | experts.write(of, family)
    own = dict(by_layer)
    for address, key in family.fields.items():
        if key in by_layer:
            continue
        value = of.one(address)
        if value in (None, ABSENT) and (other := family.instead.get(address)):
            value = of.one(other)
        if value is ABSENT:
            continue
        if address in family.switches:
            on, off = family.switches[address]
            if value not in (on, off):
                raise CannotSay(f"{address} is another than {on} in its models")
            value = value == on
        if key in own and own[key] != value:
            raise CannotSay(f"{address} = {value}, but {own[key]} has the same key, {key}")
        own[key] = value
    own |= {"architectures": [family.architecture], "model_type": family.model_type}
    own |= family.required
    own |= {other: own[key] for other, key in family.aliases.items() if key in own}
    return own | {key: own[other] for key, other in family.equal_keys.items() if other in own}


def describes(values: Values, family: Family, m: Model) -> bool:
    """Return whether a config.json is of a family, and of a model."""
    if values.get("model_type") != family.model_type:
        return False
    try:
        there = model_of(values, family)
    except ConfigError:
        return False
    return canonical(there) == canonical(m)


def dtype_keys(values: Values) -> list[str]:
    """Return the keys of config.json that name the dtype of weights."""
    return [key for key in ("dtype", "torch_dtype") if key in values] or ["dtype"]


def entry_table(family: Family, m: Model) -> list[Entry]:
    """Return where the parameters of a model are in a family's tensors."""
    return entries_of(family.names, m)
