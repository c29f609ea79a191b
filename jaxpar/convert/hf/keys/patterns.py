"""The keys of config.json about the kinds of layers of a hybrid model.

Nemotron-H has a letter for each layer. Other families name the attention of each layer.
"""

from jaxpar.config import ModelConfig
from jaxpar.config.layout.layer_kinds import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    FEED_FORWARD,
    MAMBA,
    kinds,
)
from jaxpar.convert.hf.config_file import CORRECT, Values, check_kind, refuse

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"

#: Keys with the letter of each layer, or with the name of its kind.
LETTERS, NAMES = "hybrid_override_pattern", "layers_block_type"

#: The kinds by their names, older ones included.
_BY_NAME = {
    "mamba": MAMBA,
    LINEAR: MAMBA,
    "attention": ATTENTION,
    FULL: ATTENTION,
    "mlp": FEED_FORWARD,
    "moe": EXPERTS,
}
_IN_WORDS = {
    MAMBA: "Mamba-2 (M)",
    ATTENTION: "attention (*)",
    FEED_FORWARD: "an MLP (-)",
    EXPERTS: "experts (E)",
}


def letters_in(values: Values) -> str | None:
    """Return the letter of each layer, `?` for an unknown name; None if no key has them."""
    given, named = values.get(LETTERS), values.get(NAMES)
    if given is None and isinstance(named, list):
        return "".join(_BY_NAME.get(str(name), "?") for name in named)
    return given if isinstance(given, str) else None


def read_letters(values: Values, known: str, num_layers: int) -> str:
    """Return the shortest pattern of the letters of layers, or of their names.

    Args:     known: `Family.letters`.
    """
    key = LETTERS if values.get(LETTERS) is not None else NAMES
    given = letters_in(values)
    if given is None or len(given) != num_layers:
        rule = f"must have a letter for each of num_hidden_layers = {num_layers} layers"
        raise refuse(LETTERS, values.get(key), rule, CORRECT)
    needed = known.replace(FEED_FORWARD, "") if EXPERTS in known else known
    if not set(needed) <= set(given) <= set(known):
        *first, last = (_IN_WORDS[kind] for kind in needed)
        rule = f"must have layers of {', of '.join(first)} and of {last}, and no other"
        rule += "".join(f" but of {_IN_WORDS[kind]}" for kind in known if kind not in needed)
        raise refuse(key, values.get(key), rule, "use a model with these kinds of layers")
    return period(given)


def write_letters(m: ModelConfig) -> Values:
    """Return the keys that `read_letters` reads."""
    return {LETTERS: kinds(m)}


def period(letters: str) -> str:
    """Return the shortest pattern that is repeated."""
    count = len(letters)
    lengths = (n for n in range(1, count + 1) if count % n == 0)
    return letters[: next(n for n in lengths if letters == letters[:n] * (count // n))]


def read(values: Values, num_layers: int) -> str:
    """Return the shortest pattern of layers with full and linear attention."""
    key, every = "full_attention_interval", values.get("full_attention_interval")
    check_kind(key, every, int)
    given = values.get("layer_types")
    if given is None:
        if every is None or every < 1:
            raise refuse(key, every, "must be 1 or more", CORRECT)
        given = [FULL if (i + 1) % every == 0 else LINEAR for i in range(num_layers)]
    letters = {FULL: ATTENTION, LINEAR: DELTA_NET}
    if not set(given) <= set(letters):
        fix = f"use a model with {FULL} and {LINEAR} only"
        raise refuse("layer_types", given, "has a kind of layer that jaxpar does not support", fix)
    whole = "".join(letters[kind] for kind in given)
    if DELTA_NET not in whole or ATTENTION not in whole:
        rule = f"must have layers with {FULL} and with {LINEAR}"
        raise refuse("layer_types", given, rule, "use a model with both")
    return period(whole)


def write(m: ModelConfig) -> Values:
    """Return the keys that `read` reads."""
    names = {ATTENTION: FULL, DELTA_NET: LINEAR}
    every = m.layer_pattern.index(ATTENTION) + 1 if m.layer_pattern else 1
    return {
        "full_attention_interval": every,
        "layer_types": [names[kind] for kind in kinds(m)],
    }
