"""Global layers with heads of their own: the plain model's loss and gradients on every mesh."""

import dataclasses
import functools

import flax.traverse_util
import jax
import numpy as np
import pytest

from jaxpar.certification import distances, traces
from jaxpar.config import Attention, Config, Glu, Layer, QkNorm, Rope, RopeScaling, replace
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.params import flat
from tests import weights
from tests.meshes import float8_traces
from tests.meshes.test_families import TOLERANCE, gradients_of
from tests.slow import slow
from tests.tiny import ATTENTION, EXPERTS, GLU, TINY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_compile"),
]  # quicker: test_layer_kinds.py


def two_kinds(local: Attention, feed_forward: Glu, **of_wide) -> list[Layer]:
    """A layer with a window, and a global one with heads of its own, as in Gemma 4."""
    local = dataclasses.replace(local, qk_norm=QkNorm(), value_norm=True)
    of_wide |= {"window": None, "num_kv_heads": 2, "head_dim": 16, "keys_as_values": True}
    mixers = {"layers": local, "global_layers": dataclasses.replace(local, **of_wide)}
    return [Layer(k, m, feed_forward, norms="around", scaled=True) for k, m in mixers.items()]


TURNING = Rope(scaling=RopeScaling(kind="proportional", factor=1.0, turning=0.5))
LOCAL = dataclasses.replace(ATTENTION, window=5, rope=Rope(theta=100.0), scale=0.1)
LAYERS = two_kinds(LOCAL, GLU, rope=TURNING)
GEMMA4 = replace(TINY, **{"model.layers": LAYERS})
DEEPER = {"model.num_layers": 4}
#: Both kinds with projections of values.
ALIKE = {"model.global_layers.mixer.keys_as_values": False}

CASES = [
    ("data=2,tensor=2,layer_loop=scan", {}),
    slow("data=2,zero=2,layer_loop=unroll", ALIKE),
    slow("sequence=2,tensor=2,context=ring", {}),
    slow("sequence=2,tensor=2,context=ulysses,layer_loop=unroll", {}),
    slow("data=2,tensor=2,row_groups=2,layer_loop=unroll", ALIKE),
    slow("pipeline=2,num_microbatches=2,tensor=2,layer_loop=scan", DEEPER),
    slow("pipeline=2,num_microbatches=4,data=2,zero=2,layer_loop=unroll", DEEPER | ALIKE),
    slow("data=2,remat=full,layer_loop=unroll", {"model.norm.offset": True} | DEEPER),
    slow("expert=2,tensor=2", {"model.*.feed_forward": EXPERTS, "train.balance_loss": 1e-2}),
    slow(
        "data=2,tensor=2",
        {"lora.rank": 2, "lora.targets": ("q_proj", "k_proj", "v_proj", "down_proj")},
    ),
    # A number of each layer, and norms of values, where all layers are alike.
    slow(
        "pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll",
        {"model.layers": LAYERS[:1] * 4, "model.layers.mixer.rope": TURNING},
    ),
]


#: Bound on the error of a layer's number, relative to the terms of its gradient: four roundings, of
#: the two factors of a term, of their product and of the sum. The gradient itself is no measure: it
#: is a sum over the whole stream, and terms of 2.2 add up to 0.012, of which one rounding of 2.2 is
#: 1.1e-5.
OF_TERMS = 4 * float(np.finfo(np.float32).eps)


@functools.cache
def sizes_of_terms(cfg: Config) -> dict[str, np.ndarray]:
    """The sum of the absolute values of the terms of each layer's number's gradient, [L].

    They are the gradients of a number for each element of the stream.
    """
    batch = traces.random_batch(cfg, 0)
    specs = param_specs(cfg.model, cfg.lora)
    params = dict(flat(weights.values_of(tuple(flat(specs).items()), cfg.train.seed)))
    stream = (*batch.tokens.shape, cfg.model.d_model)
    for name in [name for name in params if name.endswith("layer_scale")]:
        number = np.asarray(params[name]).reshape(-1, 1, 1, 1)
        params[name] = np.broadcast_to(number, (len(number), *stream))
    tree = flax.traverse_util.unflatten_dict(params, sep="/")
    _, grads = jax.jit(lambda p: traces.reference_gradients(p, batch, cfg))(tree)
    of_numbers = {n: g for n, g in flat(grads).items() if n.endswith("layer_scale")}
    return {n: np.abs(np.asarray(g, np.float64)).sum((1, 2, 3)) for n, g in of_numbers.items()}


def compare_with_terms(cfg: Config, mesh: str, devices) -> None:
    """As `compare`, but for the numbers of layers, whose gradients are sums that cancel."""
    found, wanted = gradients_of(cfg, mesh, devices)
    numbers = sizes_of_terms(cfg)
    for name, size in numbers.items():
        errors = np.abs(found.gradients[name].astype(np.float64) - wanted.gradients[name])
        assert np.all(errors.ravel() < OF_TERMS * size), (name, errors, size)
    others = [
        dataclasses.replace(
            trace, gradients={n: g for n, g in trace.gradients.items() if n not in numbers}
        )
        for trace in (found, wanted)
    ]
    zero = distances.zero_gradients(cfg.model) - numbers.keys()
    assert not distances.compare(*others, TOLERANCE, zero).mismatches()


@pytest.mark.parametrize(("mesh", "fields"), CASES)
def test_gradients(mesh, fields, devices):
    compare_with_terms(replace(GEMMA4, **fields), mesh, devices)


#: In the sizes that float8 needs.
FLOAT8 = two_kinds(dataclasses.replace(float8_traces.ATTENTION, window=9), Glu(96))


@pytest.mark.parametrize(
    "mesh", ["tensor=2", "data=2,layer_loop=unroll", "data=2,gather_dtype=float8"]
)
def test_float8_gradients_are_those_of_one_device(mesh, devices):
    gradients = functools.partial(
        float8_traces.first_gradients, devices=devices, model__layers=FLOAT8
    )
    one, found = gradients("data=1"), gradients(mesh)
    errors = float8_traces.relative_errors(found.gradients, one.gradients)
    assert max(errors.values()) < float8_traces.ACROSS_MESHES
