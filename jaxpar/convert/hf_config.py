"""config.json of a published model: read into our `ModelConfig`, and written from one.

What would make the model compute something that ours does not is refused by name; keys that change
nothing in the function (token ids, dropout, initial values) are let through, and carried along.
"""

import json
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError, ModelConfig, RopeScaling
from jaxpar.convert.families import FAMILIES, Family
from jaxpar.convert.layout import Entry
from jaxpar.model.transformer import param_specs
from jaxpar.params import flat

type Values = dict[str, Any]

CONFIG_FILE = "config.json"

#: Compute dtype of the model for the dtype that the weights are in.
COMPUTE_DTYPES = {"bfloat16": "bfloat16", "float16": "bfloat16", "float32": "float32"}

#: Keys that change what a model computes, whatever its family, and their one value that ours has.
REQUIRED = {
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "is_encoder_decoder": False,
    "use_qk_norm": False,
}


def refuse(key: str, value: Any, rule: str, fix: str) -> ConfigError:
    """The error for a key of config.json."""
    return ConfigError(f"{CONFIG_FILE} {key}", value, rule, fix)


def read_config_json(folder: Path) -> Values:
    """The values of a folder's config.json.

    Raises:   ConfigError when there is none, or it is not JSON.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        rule = f"has no {CONFIG_FILE}" if folder.is_dir() else "is no folder"
        fix = "give a folder with config.json and .safetensors files, as published"
        raise ConfigError("DIR", str(folder), rule, fix)
    try:
        values = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        fix = "fetch the file again"
        raise ConfigError(CONFIG_FILE, str(path), f"is not JSON ({error})", fix) from error
    if not isinstance(values, dict):
        raise ConfigError(CONFIG_FILE, str(path), "is not a JSON object", "fetch the file again")
    return values


def family_of(values: Values) -> Family:
    """The family that a config.json belongs to.

    Raises:   ConfigError for an architecture without a table.
    """
    known = {family.architecture: family for family in FAMILIES}
    names = values.get("architectures") or []
    if not names:
        names = [f.architecture for f in FAMILIES if f.model_type == values.get("model_type")]
    if len(names) == 1 and names[0] in known:
        return known[names[0]]
    shown = names or values.get("model_type")
    raise refuse(
        "architectures",
        shown,
        "is no architecture that jaxpar has",
        f"use one of {', '.join(known)}",
    )


def named_family(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:   ConfigError for an unknown one.
    """
    known = {family.model_type: family for family in FAMILIES}
    if model_type not in known:
        fix = f"use one of {', '.join(known)}"
        raise ConfigError("--family", model_type, "is no family that jaxpar has", fix)
    return known[model_type]


# ------------------------------------------------------------------------------------ reading


def model_of(values: Values, family: Family) -> ModelConfig:
    """Our fields of a config.json, with the compute dtype of its weights.

    Raises:   ConfigError naming the key that is missing or that ours cannot compute.
    """
    renamed = {key: values[other] for other, key in family.aliases.items() if other in values}
    values = family.defaults | renamed | values
    for key, wanted in (REQUIRED | family.required).items():
        found = values.get(key, wanted)
        if found != wanted and found is not None:
            raise refuse(key, found, "is not what jaxpar computes", f"use a model with {wanted!r}")
    fields: Values = dict(family.fixed)
    for ours, key in family.fields.items():
        fields[ours] = _field(ours, key, values)
    fields["rope_theta"], fields["rope_scaling"] = read_rope(values)
    fields["sliding_window"] = _window(values, fields["num_layers"]) if family.sliding else None
    dtype = dtype_of(values)
    return ModelConfig(**fields, dtype=COMPUTE_DTYPES[dtype])  # type: ignore[arg-type]


def _field(ours: str, key: str, values: Values) -> Any:
    """A field's value; what old files leave out is worked out as `transformers` does."""
    value = values.get(key)
    if value is None and ours == "head_dim":
        return values["hidden_size"] // max(values["num_attention_heads"], 1)
    if value is None and ours == "num_kv_heads":
        return values.get("num_attention_heads")
    if value is None and ours == "tie_embeddings":
        return False
    kind = type(getattr(ModelConfig(), ours))
    good = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not good:
        raise refuse(key, value, f"must be {kind.__name__}", "fetch the file again")
    return value


def dtype_of(values: Values) -> str:
    """The dtype that config.json says the weights are in; float32 when it does not say."""
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    if dtype not in COMPUTE_DTYPES:
        raise refuse("dtype", dtype, "is not a dtype of weights that jaxpar reads", "use bfloat16")
    return dtype


def read_rope(values: Values) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary frequencies, from the current form or the older one.

    Current: `rope_parameters` holds all. Older: `rope_theta`, and `rope_scaling` with `rope_type`
    or, older still, `type`.
    """
    current, older = values.get("rope_parameters"), values.get("rope_scaling")
    rope = dict(current or older or {})
    theta = rope.get("rope_theta") or values.get("rope_theta") or 10_000.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        rule = "is not what jaxpar computes"
        raise refuse("partial_rotary_factor", rope["partial_rotary_factor"], rule, "use 1.0")
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        fix = "use a model with rope_type default or llama3"
        raise refuse("rope_type", kind, "is a RoPE scaling that jaxpar does not have", fix)
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    for key in keys:
        if not isinstance(rope.get(key), int | float):
            raise refuse(key, rope.get(key), "must be a number, for rope_type llama3", "add it")
    factor, low, high, original = (rope[key] for key in keys)
    scaling = RopeScaling(
        factor=float(factor),
        low_freq_factor=float(low),
        high_freq_factor=float(high),
        original_max_position=int(original),
    )
    return float(theta), scaling


def _window(values: Values, num_layers: int) -> int | None:
    """The sliding window, if every layer has it; None if none has.

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
        rule = "gives a window to some layers only, which jaxpar does not have"
        raise refuse("sliding_window", window, rule, "use a model with one kind of layer")
    return int(window)


# ------------------------------------------------------------------------------------ writing


def why_not(family: Family, m: ModelConfig) -> str | None:
    """Why a family cannot express a model, naming the field; None when it can."""
    for name, wanted in family.fixed.items():
        if getattr(m, name) != wanted:
            return f"model.{name} = {getattr(m, name)}, and all of its models have {wanted}"
    by_key: dict[str, tuple[str, Any]] = {}
    for ours, key in family.fields.items():
        name, value = by_key.setdefault(key, (ours, getattr(m, ours)))
        if getattr(m, ours) != value:
            return f"model.{ours} = {getattr(m, ours)} and model.{name} = {value}: it has one key"
    if m.sliding_window is not None and not family.sliding:
        return f"model.sliding_window = {m.sliding_window}, and its models have none"
    missing = set(flat(param_specs(m))) - {entry.path for entry in entry_table(family, m)}
    return f"no tensor for {', '.join(sorted(missing))}" if missing else None


def choose_family(m: ModelConfig) -> Family:
    """The first family that can express a model.

    Raises:   ConfigError, with each family's reason, when none can.
    """
    reasons = {family.model_type: why_not(family, m) for family in FAMILIES}
    for family in FAMILIES:
        if reasons[family.model_type] is None:
            return family
    rule = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    fix = "export it with `to-torch`, or train a model of one of them"
    raise ConfigError("RUN", "its model", f"is of no published family ({rule})", fix)


def config_json(m: ModelConfig, family: Family, carried: Values, dtype: str) -> Values:
    """The config.json of a model.

    Args:     carried: values to keep where a model's own fields do not decide: those of the folder
              that it was imported from. dtype: of the weights on disk.
    Returns:  RoPE in the current form and in the older one, which each reader ignores of the other.
    """
    own = {key: getattr(m, ours) for ours, key in family.fields.items()}
    own |= {"architectures": [family.architecture], "model_type": family.model_type}
    own |= {"dtype": dtype, "torch_dtype": dtype} | write_rope(m) | family.required
    own |= {other: own[key] for other, key in family.aliases.items()}
    if family.sliding:
        own |= _window_keys(m, family)
    return carried | own


def write_rope(m: ModelConfig) -> Values:
    """Base and scaling of the rotary frequencies, in both forms."""
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


def _window_keys(m: ModelConfig, family: Family) -> Values:
    """The keys of a sliding window, in each way that a family's readers look for it."""
    if "use_sliding_window" not in family.defaults:
        return {"sliding_window": m.sliding_window}
    on = m.sliding_window is not None
    kind = "sliding_attention" if on else "full_attention"
    return {
        "use_sliding_window": on,
        "sliding_window": m.sliding_window,
        "max_window_layers": 0 if on else m.num_layers,
        "layer_types": [kind] * m.num_layers,
    }


def entry_table(family: Family, m: ModelConfig) -> list[Entry]:
    """The family's entries for the parameters that a model has.

    Dense and mixed feed-forwards have parameters of one name; the number of dimensions tells.
    """
    rank = {path: len(spec.shape) for path, spec in flat(param_specs(m)).items()}
    return [entry for entry in family.entries if rank.get(entry.path) == len(entry.ours)]
