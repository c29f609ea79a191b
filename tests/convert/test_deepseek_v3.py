"""DeepSeek-V3's router and experts, against the layer of `transformers`."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from jaxpar.config import ComputeConfig, Config, Experts, Glu, Layer, Model, Router
from jaxpar.convert.hf.families import shared
from jaxpar.convert.hf.names import Names, entries_of
from jaxpar.convert.hf.tensor_layout import Entry, as_ours, shape_of, tensor_name
from jaxpar.execution.decisions import execution_of
from jaxpar.model.layer import branches
from jaxpar.model.moe import router
from jaxpar.model.moe.experts import Received
from jaxpar.model.plain.decoder import plain
from tests.convert import tiny
from tests.tiny import ATTENTION

GOLDEN = dict(np.load(Path(__file__).parent / "goldens/deepseek_v3.npz"))

#: As in the goldens of whole models; the largest values of the output are about 20.
TOLERANCE = 1e-5

KEYS = tiny.DEEPSEEK_V3
ROUTER = Router(
    score="sigmoid",
    balancing_bias=True,
    groups=KEYS["n_group"],
    groups_per_token=KEYS["topk_group"],
    scale=KEYS["routed_scaling_factor"],
)
EXPERTS = Experts(
    expert=Glu(KEYS["moe_intermediate_size"]),
    num_experts=KEYS["n_routed_experts"],
    experts_per_token=KEYS["num_experts_per_tok"],
    num_shared_experts=KEYS["n_shared_experts"],
    router=ROUTER,
)
MODEL = Model(
    d_model=KEYS["hidden_size"], vocab_size=48, layers=[Layer("layers", ATTENTION, EXPERTS)]
)

NAMES = {weight: name.removeprefix("mlp.") for weight, name in shared.EXPERTS.items()}


def layer() -> tuple[jnp.ndarray, dict]:
    """The tokens, [1, T, D], and the weights in our layout."""
    tensors = tiny.deepseek_v3_tensors()

    def stacked(entry: Entry) -> jnp.ndarray:
        at = [(0, *i) for i in np.ndindex(*shape_of(entry.stacked[1:], entry.sizes))]
        parts = [as_ours(tensors[tensor_name(entry, i)], entry) for i in at]
        return jnp.asarray(np.stack(parts) if entry.stacked[1:] else parts[0])

    entries = entries_of(Names(top={}, layer="", weights={}, experts=NAMES), MODEL)
    weights = {entry.path.removeprefix("layers/"): stacked(entry) for entry in entries}
    return jnp.asarray(tensors["x"][None]), weights


def test_the_router_chooses_and_weighs_as_transformers():
    x, w = layer()
    found = router.route(x, w, EXPERTS)
    order = np.argsort(found.experts[0], axis=-1)
    ids, weights = (
        np.take_along_axis(np.asarray(a[0]), order, -1) for a in (found.experts, found.weights)
    )
    np.testing.assert_array_equal(ids, GOLDEN["experts"])
    assert np.abs(weights - GOLDEN["weights"]).max() <= TOLERANCE


def test_bias_and_groups_change_the_choice():
    """Otherwise the goldens would not test them."""
    x, w = layer()
    for fields in ({"balancing_bias": False}, {"groups": 1, "groups_per_token": 1}):
        experts = replace(EXPERTS, router=replace(ROUTER, **fields))
        found = np.sort(router.route(x, w, experts).experts[0])
        assert np.mean(np.any(found != GOLDEN["experts"], axis=-1)) > 0.05


def test_the_layer_is_that_of_transformers():
    x, w = layer()
    ex = execution_of(Config(model=MODEL, compute=ComputeConfig(dtype="float32")))
    (of,) = MODEL.layers
    context = SimpleNamespace(layer=of, loss_weight=None, rows=None, probes=(), feeds=())
    found = branches(of, MODEL)[-1].function(Received(x, x), w, context, ex).partial
    of_plain = plain(EXPERTS, x, w, None, None, MODEL)
    largest = np.abs(GOLDEN["out"]).max()
    for out in (found, of_plain):
        assert np.abs(np.asarray(out[0]) - GOLDEN["out"]).max() <= TOLERANCE * largest
