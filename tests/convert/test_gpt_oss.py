"""gpt-oss's router and experts, forward and backward, against the layer of `transformers`."""

import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpar.config import (
    ClampedSwiglu,
    ComputeConfig,
    Config,
    Experts,
    Glu,
    Layer,
    Model,
    Router,
)
from jaxpar.execution.decisions import execution_of
from jaxpar.model.layer import branches
from jaxpar.model.moe import router
from jaxpar.model.moe.experts import Received
from jaxpar.model.plain.decoder import plain
from jaxpar.sharding.mesh import make_mesh
from tests.convert import tiny
from tests.tiny import ATTENTION

GOLDEN = dict(np.load(Path(__file__).parent / "goldens/gpt_oss.npz"))

#: Relative to the largest value of an array.
TOLERANCE = 1e-5

KEYS = tiny.GPT_OSS
EXPERTS = Experts(
    expert=Glu(
        KEYS["intermediate_size"],
        activation=ClampedSwiglu(limit=KEYS["swiglu_limit"], alpha=KEYS["swiglu_alpha"]),
        bias=True,
    ),
    num_experts=KEYS["num_local_experts"],
    experts_per_token=KEYS["num_experts_per_tok"],
    router=Router(linear_bias=True),
)
MODEL = Model(
    d_model=KEYS["hidden_size"], vocab_size=48, layers=[Layer("layers", ATTENTION, EXPERTS)]
)
CONFIG = Config(model=MODEL, compute=ComputeConfig(dtype="float32"))


def ours(tensors: dict, prefix: str = "") -> dict:
    """Weights, or their gradients, in our layout: published files interleave gate and up."""
    part = lambda name: tensors[f"{prefix}experts.{name}"]  # noqa: E731
    return {
        "router": tensors[f"{prefix}router.weight"].T,
        "b_router": tensors[f"{prefix}router.bias"],
        "w_gate": part("gate_up_proj")[..., ::2],
        "w_up": part("gate_up_proj")[..., 1::2],
        "b_gate": part("gate_up_proj_bias")[..., ::2],
        "b_up": part("gate_up_proj_bias")[..., 1::2],
        "w_down": part("down_proj"),
        "b_down": part("down_proj_bias"),
    }


TENSORS = tiny.gpt_oss_tensors()
WEIGHTS = {name: jnp.asarray(a) for name, a in ours(TENSORS).items()}
X, D_OUT = (jnp.asarray(TENSORS[name][None]) for name in ("x", "d_out"))


def test_the_router_chooses_and_weighs_as_transformers():
    found = router.route(X, WEIGHTS, EXPERTS)
    order = np.argsort(found.experts[0], axis=-1)
    ids, weights = (
        np.take_along_axis(np.asarray(a[0]), order, -1) for a in (found.experts, found.weights)
    )
    np.testing.assert_array_equal(ids, GOLDEN["experts"])
    assert np.abs(weights - GOLDEN["weights"]).max() <= TOLERANCE


def test_a_part_of_gate_and_up_is_beyond_the_limit():
    """Otherwise the goldens would not test it."""
    for name, beyond in (("gate", lambda y: y > 7), ("up", lambda y: abs(y) > 7)):
        y = jnp.einsum("btd,edf->btef", X, WEIGHTS[f"w_{name}"]) + WEIGHTS[f"b_{name}"]
        assert 0.03 < jnp.mean(beyond(y)) < 0.5


def as_trained(w: dict, x: jax.Array) -> jax.Array:
    """The layer of the trained model, on a mesh of one device."""
    (layer,), ex = MODEL.layers, execution_of(CONFIG)
    empty = {"loss_weight": None, "rows": None, "probes": (), "feeds": ()}
    context = SimpleNamespace(layer=layer, **empty)
    *_, branch = branches(layer, MODEL)

    def local(w, x):
        return branch.function(Received(x, None), w, context, ex).partial

    mesh, whole = make_mesh(Config().parallel, jax.devices()[:1]), PartitionSpec()
    return jax.shard_map(local, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)(w, x)


def as_plain(w: dict, x: jax.Array) -> jax.Array:
    return plain(EXPERTS, x, w, None, None, MODEL)


LAYERS = {"trained": as_trained, "plain": as_plain}


@pytest.mark.parametrize("which", LAYERS)
@pytest.mark.usefixtures("quick_compile")
def test_output_and_every_gradient_are_those_of_transformers(which):

    @jax.jit
    def both(w, x, d_out):
        out, pullback = jax.vjp(LAYERS[which], w, x)
        return out, *pullback(d_out)

    out, d_w, d_x = both(WEIGHTS, X, D_OUT)
    close = functools.partial(np.testing.assert_allclose, rtol=0)
    found, wanted = {**d_w, "x": d_x[0], "out": out[0]}, ours(GOLDEN, "d_")
    wanted |= {"x": GOLDEN["d_x"], "out": GOLDEN["out"]}
    for name, a in wanted.items():
        close(found[name], a, atol=TOLERANCE * np.abs(a).max(), err_msg=name)
