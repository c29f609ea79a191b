"""The table of incompatible combinations: every row can hold, and refuses."""

import re
import typing
from typing import Any

import pytest

from jaxpar.config import Config, default_of, registry, replace
from jaxpar.config.fields import field_types
from jaxpar.config.incompatible import TABLE, combinations
from jaxpar.extend import Attention, Glu, Layer, component


@component
class Mean(Attention):
    """Attention with another function."""

    def heads(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return q


SIZES = {"num_kv_heads": 2, "head_dim": 8}
COMPOSED = (Layer("block", Mean(num_heads=2, sinks=True, softcap=9.0, **SIZES), Glu(d_ff=16)),)
HEADS = tuple(Layer(f"of_{n}", Attention(num_heads=n, **SIZES), Glu(d_ff=16)) for n in (2, 4))
LATENT = {"model.kv_lora_rank": 8, "model.num_kv_heads": 8, "model.head_dim": 128}
DENSE = {"model.num_experts": 4, "model.dense_layers": 1}
PATTERN = {"model.layer_pattern": "G*"}

#: Fields with which parts of a model are there, and values that are no choice of their field.
EXAMPLES: dict[str, dict[str, Any]] = {
    "experts": {"model.num_experts": 4},
    "experts without a gate": {"model.num_experts": 4, "model.mlp_gate": False},
    "biases of experts": {"model.num_experts": 4, "model.expert_bias": True},
    "dense layers beside experts (`model.dense_layers`)": DENSE,
    "dense layers beside experts, without a pipeline": DENSE,
    "layers before the stages of a pipeline": DENSE | {"parallel.pipeline": 2},
    "dense layers between layers with experts (`model.moe_every`)": DENSE
    | {"model.moe_every": 2, "model.dense_layers": 2},
    "latent attention": LATENT,
    "recurrent layers": PATTERN,
    "`model.layer_pattern`": PATTERN,
    "Kimi Delta Attention": {"model.layer_pattern": "K*"},
    "a recurrent last layer": {"model.layer_pattern": "*G"},
    "layers that differ (kinds, windows, positions)": {"model.nope_every": 2},
    "layers of several names, dense ones included": PATTERN,
    "a norm of queries and keys": {"model.qk_norm": True},
    "attention within chunks": {"model.attention_chunk": 8},
    "a cap of scores": {"model.attention_softcap": 50.0},
    "attention sinks": {"model.attention_sinks": True},
    "a registered attention function": {"model.attention": "mine"},
    "attention with another method `heads`": {"model.layers": COMPOSED},
    "layers with different numbers of heads": {"model.layers": HEADS},
    "a list of layers that differ": {"model.layers": HEADS},
    "parallel blocks": {"model.parallel_block": True},
    "`optimizer.name` for whole matrices": {"optimizer.name": "muon"},
    "`parallel.remat` with host memory": {"parallel.remat": "dots_offload"},
    "`model.mup`": {"model.mup.base_width": 64},
    "`model.mup.base_head_dim`": {"model.mup.base_head_dim": 32},
    "`train.probes`": {"train.probes": (object(),)},
    "`train.post_updates`": {"train.post_updates": (object(),)},
    "`train.loss`": {"train.loss": object()},
}


def fields_of(label: str) -> dict[str, Any]:
    """Fields with which a condition holds."""
    if label in EXAMPLES:
        return EXAMPLES[label]
    if " and " in label:
        one, _, other = label.partition(" and ")
        return fields_of(one) | fields_of(other)
    path, *said = re.findall(r"`([^`]*)`", label)
    hint, default = field_types()[path], default_of(path)
    usual = {bool: [True, False], int: [0, 1, 2], float: [0.0, 0.1, 1.5], str: ["", "1:2"]}
    words = [word for one in (hint, *typing.get_args(hint)) for word in typing.get_args(one)]
    values = [*usual.get(hint, []), *(word for word in words if isinstance(word, str | int))]
    if "other than" in label:
        fits = [value for value in values if str(value) not in said]
    else:
        fits = [v for v in values if (str(v) in said if said else v != default)]
    return {path: fits[-1]}


ROWS = [pytest.param(row, id=f"{row.one.label} x {row.other.label}") for row in TABLE]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_refuses(row, monkeypatch):
    monkeypatch.setattr(registry, "_ADDED", {path: {} for path in registry.fields()})
    registry.add("model.attention", "mine", lambda q, k, v, mask: q)
    one, other = fields_of(row.one.label), fields_of(row.other.label)
    both = one | other
    if "model.layers" in both:  # which say all of their layers
        both = {path: v for path, v in both.items() if not path.startswith("model.")} | {
            "model.layers": both["model.layers"]
        }
    both = replace(Config(), **both)
    errors = [error for error in combinations(both) if error.rule.endswith(f": {row.why}")]
    named = [error for error in errors if error.field == row.one.named(both)[0]]
    assert named and " is not supported with " in f" {named[0].rule}"
    with_one = replace(Config(), **one)
    assert row.one.holds(with_one) or "pipeline" in row.one.label
    assert not (row.one.holds(Config()) and row.other.holds(Config()))


def test_rows_are_pairs_of_different_conditions():
    pairs = [frozenset((row.one.label, row.other.label)) for row in TABLE]
    assert all(len(pair) == 2 for pair in pairs) and len({*pairs}) == len(pairs)
    assert all(row.why and not row.why.endswith(".") for row in TABLE)


def test_conditions_on_components_have_addresses():
    """Of a composed model, an error names the part of the layer."""
    more = {"parallel.context": "ring", "parallel.sequence": 2}
    cfg = replace(Config(), **{"model.layers": COMPOSED}, **more)
    said = "\n".join(f"{error.field} = {error.value!r} {error.rule}" for error in combinations(cfg))
    assert "model.block.mixer.sinks = True is not supported with model.block.mixer = Mean" in said
    assert "model.block.mixer.softcap = 9.0 is not supported with model.block.mixer = Mean" in said
    assert "parallel.context = 'ring' is not supported with model.block.mixer = Mean" in said
