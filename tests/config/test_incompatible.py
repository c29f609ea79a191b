"""The table of incompatible combinations: every row can hold, and refuses."""

import dataclasses
import re
import typing
from typing import Any

import pytest

from jaxpar.config import Glu, KimiDeltaAttention, Layer, Mlp, QkNorm, default_of, replace
from jaxpar.config.fields import field_types, optional_sections, switch_of
from jaxpar.config.incompatible import TABLE, combinations
from jaxpar.config.listed import item_of
from jaxpar.extend import Attention, component
from tests.config.models import (
    ATTENTION,
    BASE,
    DELTA,
    EXPERTS,
    GLU,
    LATENT,
    LAYER,
    OF_EXPERTS,
    lists_of,
    setting,
)


@component
class Mean(Attention):
    """Attention with another function."""

    def heads(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return q


KDA = KimiDeltaAttention(num_heads=4, key_head_dim=32, value_head_dim=32)
SIZES = {"num_kv_heads": 2, "head_dim": 8}
MINE = Layer("block", Mean(num_heads=2, sinks=True, softcap=9.0, **SIZES), GLU)
HEADS = [Layer(f"of_{n}", Attention(num_heads=n, **SIZES), GLU) for n in (2, 4)]
FIRST = [LAYER, *[dataclasses.replace(OF_EXPERTS, name="moe_layers")] * 3]
OWN_HEADS = "attention with another method `heads`"


def attention(**fields: Any) -> list[Layer]:
    """A layer whose attention has other fields."""
    return [Layer("layers", dataclasses.replace(ATTENTION, **fields), GLU)]


def experts(expert: Glu) -> list[Layer]:
    return [Layer("layers", ATTENTION, dataclasses.replace(EXPERTS, expert=expert))]


#: Layers with which a condition on layers holds.
LAYERS: dict[str, list[Layer]] = {
    "experts": [OF_EXPERTS],
    "experts without a gate": experts(Mlp(704, activation="gelu")),
    "biases of experts": experts(Glu(704, bias=True)),
    "layers before the stages of a pipeline": FIRST,
    "latent attention": [Layer("layers", LATENT, GLU)],
    "recurrent layers": [DELTA],
    "Kimi Delta Attention": [Layer("kda_layers", KDA, GLU)],
    "a recurrent last layer": [LAYER, DELTA],
    "layers that differ (kinds, windows, positions)": HEADS,
    "layers of several names, dense ones included": HEADS,
    "a list of layers that differ": HEADS,
    "layers with different numbers of heads": HEADS,
    "a norm of queries and keys": attention(qk_norm=QkNorm()),
    "attention within chunks": attention(chunk=8),
    "a cap of scores": attention(softcap=50.0),
    "attention sinks": attention(sinks=True),
    OWN_HEADS: [MINE],
    "parallel blocks": [dataclasses.replace(LAYER, parallel="own_norms")],
    "scaled layers": [dataclasses.replace(LAYER, scaled=True)],
}

#: Layers with which two conditions on layers hold.
OF_BOTH = {
    ("a cap of scores", OWN_HEADS): [MINE],
    ("attention sinks", OWN_HEADS): [MINE],
    ("biases of experts", "experts without a gate"): experts(Mlp(704, "gelu", bias=True)),
    ("parallel blocks", "latent attention"): [Layer("x", LATENT, GLU, parallel="own_norms")],
    ("attention within chunks", "latent attention"): [
        Layer("x", dataclasses.replace(LATENT, chunk=8), GLU)
    ],
}


def layers_of(one: str, other: str) -> list[Layer]:
    """Layers with which two conditions hold."""
    named = [dataclasses.replace(x, name="more") for x in LAYERS[one]]
    return OF_BOTH.get((one, other), [*named, *LAYERS[other]])


#: Fields with which other conditions hold, and values that are no choice of their field.
EXAMPLES: dict[str, dict[str, Any]] = {
    "`optimizer.name` for whole matrices": {"optimizer.name": "muon"},
    "`parallel.remat` with host memory": {"parallel.remat": "dots_offload"},
    "`model.mup.base_head_dim`": {"model.mup.base_head_dim": 32},
    "`train.probes`": {"train.probes": (object(),)},
    "`train.post_updates`": {"train.post_updates": (object(),)},
    "`train.loss`": {"train.loss": object()},
    "`data.source`": {"data.source": object()},
    "a `Schedule` of a user": {"optimizer.schedule": object()},
}


def fields_of(label: str) -> dict[str, Any]:
    """Fields with which a condition holds."""
    if label in LAYERS:
        more = {"parallel.pipeline": 2} if "pipeline" in label else {}
        return {"model.layers": LAYERS[label], **more}
    if label in EXAMPLES:
        return EXAMPLES[label]
    if " and " in label:
        one, _, other = label.partition(" and ")
        return fields_of(one) | fields_of(other)
    path, *said = re.findall(r"`([^`]*)`", label)
    if path in optional_sections():  # enabled
        return setting(switch_of(path), default_of(switch_of(path)))
    hint, default = field_types()[path], default_of(path)
    if (item := item_of(hint)) is not None:
        return {path: lists_of(item)[0]}
    usual = {bool: [True, False], int: [0, 1, 2], float: [0.0, 0.1, 1.5], str: ["", "1:2"]}
    words = [word for one in (hint, *typing.get_args(hint)) for word in typing.get_args(one)]
    values = [*usual.get(hint, []), *(word for word in words if isinstance(word, str | int))]
    if "other than" in label:
        fits = [value for value in values if str(value) not in said]
    else:
        fits = [v for v in values if (str(v) in said if said else v != default)]
    return setting(path, fits[-1])


ROWS = [pytest.param(row, id=f"{row.one.label} x {row.other.label}") for row in TABLE]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_refuses(row):
    labels = row.one.label, row.other.label
    one, other = map(fields_of, labels)
    both = one | other
    if "model.layers" in one and "model.layers" in other:
        both["model.layers"] = layers_of(*labels)
    cfg = replace(BASE, **both)
    errors = [error for error in combinations(cfg) if error.rule.endswith(f": {row.why}")]
    named = [error for error in errors if error.field == row.one.named(cfg)[0]]
    assert named and " is not supported with " in f" {named[0].rule}"
    assert row.one.holds(replace(BASE, **one)) and row.other.holds(replace(BASE, **other))
    assert not (row.one.holds(BASE) and row.other.holds(BASE))


def test_rows_are_pairs_of_different_conditions():
    pairs = [frozenset((row.one.label, row.other.label)) for row in TABLE]
    assert all(len(pair) == 2 for pair in pairs) and len({*pairs}) == len(pairs)
    assert all(row.why and not row.why.endswith(".") for row in TABLE)


def test_no_field_of_a_section_that_is_off_holds():
    conditions = [one for row in TABLE for one in (row.one, row.other)]
    named = [(one, re.match("`([a-z_.]+)`", one.label)) for one in conditions]
    inside = [
        one for one, path in named if path and path[1].rpartition(".")[0] in optional_sections()
    ]
    assert {one.label for one in inside} > {"`distill.cache`", "`diloco.fragments`"}
    assert not [one.label for one in inside if one.holds(BASE)]


def test_conditions_on_components_have_addresses():
    """Of a composed model, an error names the part of the layer."""
    more = {"parallel.context": "ring", "parallel.sequence": 2}
    cfg = replace(BASE, **{"model.layers": [MINE]}, **more)
    said = "\n".join(f"{error.field} = {error.value!r} {error.rule}" for error in combinations(cfg))
    assert "model.block.mixer.sinks = True is not supported with model.block.mixer = Mean" in said
    assert "model.block.mixer.softcap = 9.0 is not supported with model.block.mixer = Mean" in said
    assert "parallel.context = 'ring' is not supported with model.block.mixer = Mean" in said
