"""The model of a published config.json, to train it from scratch: `--model.from`.

Only config.json is read. Unlike an import of weights, every key must be known: one that is not may
change the model.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError, Model
from jaxpar.convert.hf.config import (
    FREE_MODEL_FIELDS,
    dtype_of,
    family_of,
    model_of,
    named_family,
)
from jaxpar.convert.hf.config_file import CONFIG_FILE, Values, read_config_json, refuse
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.keys.known import unknown
from jaxpar.model.flops import num_params
from jaxpar.stores import reading


def model_from(named: str, family: str | None, like: Model) -> Model:
    """Return the model of a published config.json, and print its fields on standard error.

    Args:     named: folder, or name on the Hugging Face Hub. family: `model_type` that it must
              have; None for any. like: model with the fields that config.json does not determine,
              such as init_std.
    Raises:   ConfigError that names the key or the option that is wrong or not supported.
    """
    rule = "is not a folder"
    fix = f"use a folder with {CONFIG_FILE}, or org/model of the Hugging Face Hub"
    found = reading.find_model(named, "model.from", (CONFIG_FILE,), rule, fix)
    values = read_config_json(Path(found.folder))
    table = family_of(values)
    kind = table.model_type
    if family is not None and named_family(family, "model.family").model_type != kind:
        rule = f"is not the family of {named}, which is {kind}"
        raise ConfigError("model.family", family, rule, f"use --model.family {kind}")
    _refuse_unknown(values, table)
    dtype_of(values)
    published = model_of(values, table)
    free = {name: getattr(like, name) for name in sorted(FREE_MODEL_FIELDS)}
    model = dataclasses.replace(published, **free)
    print(in_words(found.name, table, model), file=sys.stderr, flush=True)
    return model


def in_words(name: str, family: Family, model: Model) -> str:
    """Describe a model's fields that are not the defaults, and its layers, in one line."""
    shown = [f"num_layers {len(model.layers)}"]
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if value != field.default and field.name not in ("layers", "norm", "init_std"):
            shown.append(f"{field.name} {value}")
    shown.append(f"norm {_words(model.norm)}")
    for stack, layers in model.stacks.items():
        terms = filter(None, (layers[0].mixer, layers[0].feed_forward))
        shown.append(f"{len(layers)} {stack}: {' and '.join(map(_words, terms))}")
    size = f"{num_params(model):,} parameters"
    return f"model from {name} (family {family.model_type}): {size}; {', '.join(shown)}"


def _words(node: Any) -> Any:
    """Describe a component by its class and the fields that are not the defaults."""
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return node
    values = ((f.name, getattr(node, f.name), f.default) for f in dataclasses.fields(node))
    fields = (f"{name} {_words(value)}" for name, value, default in values if value != default)
    return " ".join([type(node).__name__, *fields])


def _refuse_unknown(values: Values, family: Family) -> None:
    """Raises:   ConfigError that names the first key that the family does not have."""
    for key, value in unknown(values, family).items():
        rule = f"is not a key of {family.model_type} that jaxpar knows: it may change the model"
        raise refuse(key, value, rule, "use a config.json without it, if it does not")
