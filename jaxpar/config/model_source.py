"""The options that take the model's fields from a published model: --model.from and --model.family.

`parse_overrides` applies them before all other options. Programs pass the function that reads the
published config.json (`convert/shape.py`).
"""

import dataclasses
from collections.abc import Callable, Sequence

from jaxpar.config import Config, ConfigError, Model

FROM, FAMILY = "--model.from", "--model.family"

#: Takes the model's fields and the weights: --model.from and --run.init-from of one name.
ALL_FROM = "--from"

#: (name or folder of a published model, its family or None, the config's model) -> its model.
type ModelReader = Callable[[str, str | None, Model], Model]


def take_source(args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separate these options from the others.

    Args:     args: after `expand_set_options`.
    Returns:  (the other arguments, the value of each option that is given).
    Raises:   ConfigError for an option without a value, or given twice.
    """
    rest, found, words = list[str](), dict[str, str](), iter(args)
    for arg in words:
        name, given, text = arg.partition("=")
        if name not in (FROM, FAMILY, ALL_FROM):
            rest.append(arg)
            continue
        text = text if given else next(words, "")
        if not text or text.startswith("--"):
            example = "llama" if name == FAMILY else "meta-llama/Llama-3.2-1B"
            raise ConfigError(name[2:], "", "needs a value", f"use {name} {example}")
        if name == ALL_FROM:
            rest, name = [f"--run.init-from={text}", *rest], FROM
        if name in found:
            raise ConfigError(name[2:], text, "is given twice", f"use {name} once")
        found[name] = text
    return rest, found


def apply_source(cfg: Config, found: dict[str, str], reader: ModelReader | None) -> Config:
    """Return the config with the model that the options name, if there are any.

    Raises:   ConfigError if the program has no reader, or `--model.family` is alone; those of the
              reader.
    """
    if not found:
        return cfg
    name, family = found.get(FROM), found.get(FAMILY)
    if name is None:
        rule, fix = f"needs {FROM}", f"use {FROM} FOLDER, or org/model of the Hugging Face Hub"
        raise ConfigError(FAMILY[2:], family, rule, fix)
    if reader is None:
        rule = "is not an option of this program"
        fix = "use it with jaxpar.train, and then the run's folder here"
        raise ConfigError(FROM[2:], name, rule, fix)
    return dataclasses.replace(cfg, model=reader(name, family, cfg.model))
