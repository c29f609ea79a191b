"""The keys of config.json about the kinds of layers of a hybrid model.

Nemotron-H has a letter for each layer. Other families name the attention of each layer.
"""

from typing import Any

from jaxpar.components.attention import Attention
from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Mlp
from jaxpar.components.recurrent import GatedDeltaNet, Mamba2
from jaxpar.convert.hf.composed import CannotSay, Composition, Draft
from jaxpar.convert.hf.config_file import CORRECT, Values, check_kind, refuse

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"

#: Keys with the letter of each layer, or with the name of its kind.
LETTERS, NAMES = "hybrid_override_pattern", "layers_block_type"

#: The letters, after Nemotron-H's, and the components of layers of each kind.
ATTENTION, MAMBA, FEED_FORWARD, EXPERTS = "*", "M", "-", "E"
_DRAFTS = {
    ATTENTION: (Attention, None, "layers"),
    MAMBA: (Mamba2, None, "mamba_layers"),
    FEED_FORWARD: (None, Mlp, "mlp_layers"),
    EXPERTS: (None, Experts, "moe_layers"),
}

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


def read_letters(values: Values, num_layers: int) -> list[Draft]:
    """Return layers by their letters, or by their names."""
    key = LETTERS if values.get(LETTERS) is not None else NAMES
    given = letters_in(values)
    if given is None or len(given) != num_layers:
        rule = f"must have a letter for each of num_hidden_layers = {num_layers} layers"
        raise refuse(LETTERS, values.get(key), rule, CORRECT)
    needed, known = ("M*E", "M*E-") if EXPERTS in given else ("M*-", "M*-")
    if not set(needed) <= set(given) <= set(known):
        *first, last = (_IN_WORDS[kind] for kind in needed)
        rule = f"must have layers of {', of '.join(first)} and of {last}, and no other"
        rule += "".join(f" but of {_IN_WORDS[kind]}" for kind in known if kind not in needed)
        raise refuse(key, values.get(key), rule, "use a model with these kinds of layers")
    return [Draft(*_DRAFTS[letter]) for letter in given]


def write_letters(of: Composition) -> Values:
    """Return the keys that `read_letters` reads."""
    letters: dict[Any, str] = {pair[:2]: letter for letter, pair in _DRAFTS.items()}
    terms = [(x.mixer, x.feed_forward) for x in of.layers]
    found = [tuple(None if t is None else type(t) for t in pair) for pair in terms]
    if other := [
        layer for layer, pair in zip(of.layers, found, strict=True) if pair not in letters
    ]:
        raise CannotSay(f"model.{other[0].name} is no layer with one component of its models")
    return {LETTERS: "".join(letters[pair] for pair in found)}


def read(values: Values, drafts: list[Draft]) -> None:
    """Read which layers have full and linear attention."""
    key, every = "full_attention_interval", values.get("full_attention_interval")
    check_kind(key, every, int)
    given = values.get("layer_types")
    if given is None:
        if every is None or every < 1:
            raise refuse(key, every, "must be 1 or more", CORRECT)
        given = [FULL if (i + 1) % every == 0 else LINEAR for i in range(len(drafts))]
    if not set(given) <= {FULL, LINEAR}:
        fix = f"use a model with {FULL} and {LINEAR} only"
        raise refuse("layer_types", given, "has a kind of layer that jaxpar does not support", fix)
    if {FULL, LINEAR} != set(given):
        rule = f"must have layers with {FULL} and with {LINEAR}"
        raise refuse("layer_types", given, rule, "use a model with both")
    for draft, kind in zip(drafts, given, strict=True):
        if kind == LINEAR:
            draft.mixer, draft.name = GatedDeltaNet, "delta_layers"


def write(of: Composition) -> Values:
    """Return the keys that `read` reads."""
    kinds = [LINEAR if isinstance(a, GatedDeltaNet) else FULL for a in of.mixers]
    every = kinds.index(FULL) + 1 if FULL in kinds else 1
    return {"full_attention_interval": every, "layer_types": kinds}
