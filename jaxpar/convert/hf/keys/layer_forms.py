"""The kinds of layers in config.json, by name and in another form: both must say the same.

`layer_types` names each layer's attention. Other keys say which layers differ: every how many, or
from which layer on.
"""

from collections.abc import Iterator
from typing import Any

from jaxpar.convert.hf.config_file import Values, refuse
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.keys import kimi_linear, patterns
from jaxpar.convert.hf.keys.patterns import FULL, LINEAR, SLIDING

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
