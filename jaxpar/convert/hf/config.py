"""Converts the config.json of a published model to a `ModelConfig`, and back.

A key that makes the model compute something jaxpar does not support is refused by name. Keys that
do not affect the function (token ids, dropout, initial values) are accepted, and kept for export.
"""

import dataclasses
from typing import Any, Literal

from jaxpar.config import ConfigError, ModelConfig
from jaxpar.config.layout.layer_kinds import (
    EXPERTS,
    FEED_FORWARD,
    KDA_DENSE,
    STACKS,
    dense_places,
    kinds,
)
from jaxpar.config.rules.experts import router_has_no_gradient
from jaxpar.convert.hf.config_file import CORRECT, Values, refuse
from jaxpar.convert.hf.families import FAMILIES
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.float8_blocks import is_float8_blocks
from jaxpar.convert.hf.keys import (
    experts,
    global_heads,
    kimi_linear,
    layers,
    patterns,
    two_forms,
)
from jaxpar.convert.hf.keys.known import REQUIRED
from jaxpar.convert.hf.tensor_layout import Entry
from jaxpar.convert.torch_names import PLAIN
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.params import flat

#: Compute dtype of the model, by dtype of the weights.
COMPUTE_DTYPES: dict[str, Literal["bfloat16", "float32"]] = {
    "bfloat16": "bfloat16",
    "float16": "bfloat16",
    "float32": "float32",
}

#: Fields of the model that a published config.json does not determine.
FREE_MODEL_FIELDS = {
    "init_std",
    "recurrent_chunk",
    # Without effect in models without experts; with experts, each has a key or a fixed value.
    "experts_per_token",
    "normalize_experts",
}

#: Fields of the model that are a number or None.
OPTIONAL_FLOATS = {"attention_multiplier", "attention_softcap", "logits_softcap"}

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
        return _with_letters(values, known[names[0]])
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


def _with_letters(values: Values, family: Family) -> Family:
    """Return the table of a family's models with experts, or of those without, by their layers."""
    if not family.letters:
        return family
    has_experts = EXPERTS in (patterns.letters_in(values) or "")
    same = (f for f in FAMILIES if f.model_type == family.model_type)
    return next(f for f in same if (EXPERTS in f.letters) == has_experts)


def named_family(model_type: str, m: ModelConfig, option: str = "--family") -> Family:
    """Return the family with a `model_type`, for a model.

    Args:     option: for errors.
    Raises:   ConfigError for an unknown one.
    """
    found = [family for family in FAMILIES if family.model_type == model_type]
    if not found:
        fix = f"use one of {', '.join(dict.fromkeys(f.model_type for f in FAMILIES))}"
        raise ConfigError(option, model_type, "is not a family that jaxpar supports", fix)
    return next((f for f in found if _may_have_experts(f) == (m.num_experts > 0)), found[0])


def _may_have_experts(family: Family) -> bool:
    return "num_experts" in family.fields


# ------------------------------------------------------------------------------------ reading


def model_of(values: Values, family: Family) -> ModelConfig:
    """Convert a config.json to a ModelConfig.

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
    fields: Values = dict(family.fixed)
    for ours, key in family.fields.items():
        fields[ours] = _field(ours, key, values)
    if family.heads_alike:
        heads = fields["num_heads"]
        alike = {"num_kv_heads": heads, "head_dim": fields["d_model"] // max(heads, 1)}
        fields |= alike
    fields |= layers.read(values, family, fields["num_layers"])
    fields |= experts.read(values, family, fields["d_ff"])
    for key, other in family.equal_keys.items():
        if values.get(key) != values.get(other):
            rule = f"must be {other} = {values.get(other)}, which jaxpar has one field for"
            raise refuse(key, values.get(key), rule, "use a model in which they are equal")
    letters = set(fields.get("layer_pattern", ""))
    if not fields.get("dense_layers") and letters.isdisjoint({FEED_FORWARD, KDA_DENSE}):
        fields.pop("dense_d_ff", None)
    model = ModelConfig(**fields)
    if router_has_no_gradient(model):
        rule = "gives each token one expert, with a weight of 1: the router could not be trained"
        fix = "use a model with at least 2, or without norm_topk_prob"
        raise refuse(family.fields["experts_per_token"], 1, rule, fix)
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
    for ours in ("num_layers", "num_experts"):
        key = family.fields.get(ours, "")
        count = values.get(key)
        if ours == "num_experts" and not any("{E}" in entry.name for entry in family.entries):
            break  # a tensor has all experts
        if ours == "num_layers" and EXPERTS in family.letters:
            count = (patterns.letters_in(values) or "").count(EXPERTS)
        elif ours == "num_layers" and isinstance(count, int):
            dense = values.get(family.fields.get("dense_layers", ""), 0)
            count -= dense if isinstance(dense, int) else 0
        wanted *= max(count, 1) if isinstance(count, int) else 1
        if wanted > num_tensors:
            rule = f"asks for more tensors than the {num_tensors} in the files"
            raise refuse(key, count, rule, "use the config.json of these files")


def _field(ours: str, key: str, values: Values) -> Any:
    """Return the value of a field; for keys missing in old files, the default of `transformers`."""
    value = values.get(key)
    if value is None and ours == "head_dim":
        return values["hidden_size"] // max(values["num_attention_heads"], 1)
    if value is None and ours == "d_ff" and key == "n_inner":  # GPT-2
        return 4 * values["n_embd"]
    if value is None and ours == "num_kv_heads":
        return values.get("num_attention_heads")
    if value is None and ours == "tie_embeddings":
        return False
    default = getattr(ModelConfig(), ours)
    kind = int if default is None else type(default)
    if ours in OPTIONAL_FLOATS:
        if value is None:
            return None
        kind = float
    good = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not good or isinstance(value, bool) is not (kind is bool):
        raise refuse(key, value, f"must be {kind.__name__}", CORRECT)
    least = min(default or 0, 1)  # 0 where it stands for none
    if kind is int and value is not None and value < least:
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


def why_not(family: Family, m: ModelConfig) -> str | None:
    """Return why a family cannot express a model, naming the field; None if it can."""
    for name, wanted in family.fixed.items():
        if getattr(m, name) != wanted:
            return f"model.{name} = {getattr(m, name)}, but all of its models have {wanted}"
    by_key: dict[str, tuple[str, Any]] = {}
    for ours, key in family.fields.items():
        name, value = by_key.setdefault(key, (ours, getattr(m, ours)))
        if getattr(m, ours) != value:
            return f"model.{ours} = {getattr(m, ours)}, model.{name} = {value}: they share a key"
    others = FREE_MODEL_FIELDS | {*family.fields, *family.fixed, *layers.fields(family)}
    others |= {"num_shared_experts"} if family.shared_width else set()
    if family.heads_alike:
        others |= {"num_kv_heads", "head_dim"}
        if m.num_kv_heads != m.num_heads:
            return f"model.num_kv_heads = {m.num_kv_heads}, but its models have num_heads"
    for field in dataclasses.fields(ModelConfig):
        value = getattr(m, field.name)
        if field.name not in others and value != field.default:
            return f"model.{field.name} = {value}, but its models have {field.default}"
    for name, least in family.at_least.items():
        if getattr(m, name) < least:
            return f"model.{name} = {getattr(m, name)}, but its models have at least {least}"
    for name in family.given:
        if getattr(m, name) is None:
            return f"model.{name} = None, but its models have a number"
    if family.kimi_linear and (reason := kimi_linear.why_not(m)):
        return reason
    if reason := layers.why_not_rope(family, m.rope_scaling):
        return reason
    if family.global_heads and (reason := global_heads.why_not(m)):
        return reason
    wide = m.num_heads * m.head_dim
    if family.heads_fill_model and wide != m.d_model:
        return (
            f"model.num_heads * model.head_dim = {wide}, but its models have d_model, {m.d_model}"
        )
    missing = {path for path in flat(param_specs(m)) if path.split("/")[0] not in family.without}
    missing -= {entry.path for entry in entry_table(family, m)}
    return f"no tensor for {', '.join(sorted(missing))}" if missing else None


def choose_family(m: ModelConfig) -> Family:
    """Return the first family that can express a model, among those with experts or without.

    Raises:   ConfigError with a reason for each of these families, if none can.
    """
    alike = [f for f in FAMILIES if _may_have_experts(f) == (m.num_experts > 0)]
    reasons = {family.model_type: why_not(family, m) for family in alike}
    for family in alike:
        if reasons[family.model_type] is None:
            return family
    rule = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    fix = "export it with `to-torch`, or " if why_not(PLAIN, m) is None else ""
    fix += "train a model of one of them"
    raise ConfigError("RUN", "its model", f"fits no published family ({rule})", fix)


def config_json(m: ModelConfig, family: Family, carried: Values, dtype: str) -> Values:
    """Make the config.json of a model.

    A file that describes the model is kept as it is, but for the dtype. Any other contains RoPE in
    the current and in the older form; readers ignore the form they do not know.

    Args:     carried: values to keep unless the model's fields set them: those of the folder that
              it was imported from. dtype: of the weights on disk.
    """
    if describes(carried, family, m):
        kept = {key: value for key, value in carried.items() if key != QUANTIZATION}
        return kept | {key: dtype for key in dtype_keys(kept)}
    own = {key: getattr(m, ours) for ours, key in family.fields.items()}
    own |= {"architectures": [family.architecture], "model_type": family.model_type}
    for ours, other in family.same_as.items():
        if getattr(m, ours) is None:
            own[family.fields[ours]] = getattr(m, other)
    own |= {"dtype": dtype, "torch_dtype": dtype} | layers.write(m, family) | family.required
    own |= experts.write(m, family)
    own |= {other: own[key] for other, key in family.aliases.items()}
    own |= {key: own[other] for key, other in family.equal_keys.items()}
    dropped = {QUANTIZATION} | two_forms.names(family) | two_forms.OTHER_FORMS
    if "max_positions" in family.fields:  # transformers would take it for that field
        dropped.add("max_position_embeddings")
    return {key: value for key, value in carried.items() if key not in dropped} | own


def describes(values: Values, family: Family, m: ModelConfig) -> bool:
    """Return whether a config.json is of a family, and of a model."""
    if values.get("model_type") != family.model_type:
        return False
    try:
        there = model_of(values, family)
    except ConfigError:
        return False
    names = {field.name for field in dataclasses.fields(ModelConfig)} - FREE_MODEL_FIELDS
    names |= {"experts_per_token", "normalize_experts"} if m.num_experts else set()
    return all(getattr(there, name) == getattr(m, name) for name in names)


def dtype_keys(values: Values) -> list[str]:
    """Return the keys of config.json that name the dtype of weights."""
    return [key for key in ("dtype", "torch_dtype") if key in values] or ["dtype"]


def entry_table(family: Family, m: ModelConfig) -> list[Entry]:
    """Return the family's entries for the parameters of a model.

    Parameters of dense and mixture-of-experts layers share names; their ranks differ.
    """
    rank = {path: len(spec.shape) for path, spec in flat(param_specs(m)).items()}
    held = (entry for entry in family.entries if rank.get(entry.path) == len(entry.ours))
    if m.moe_every > 1:
        dense = dense_places(m)
        others = tuple(i for i in range(m.num_layers) if i not in dense)
        of_stack = {"dense_layers": dense, "layers": others}
        layers_of = lambda path: of_stack.get(path.partition("/")[0], ())  # noqa: E731
        return [dataclasses.replace(entry, layers=layers_of(entry.path)) for entry in held]
    if not m.layer_pattern:
        first = lambda path: m.num_layers if path.startswith("mtp/") else m.dense_layers  # noqa: E731
        return [dataclasses.replace(entry, first=first(entry.path)) for entry in held]
    stacks = {stack: kind for kind, stack in STACKS.items()}

    def places(path: str) -> tuple[int, ...]:
        kind = stacks.get(path.partition("/")[0])
        return tuple(i for i, letter in enumerate(kinds(m)) if letter == kind)

    return [dataclasses.replace(entry, layers=places(entry.path)) for entry in held]
