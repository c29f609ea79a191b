"""Moments in 8 bits: their code, their blocks, and the update, on every mesh, as in plain numpy."""

import dataclasses
import functools
import itertools
import math

import chex
import jax
import numpy as np
import pytest

from jaxpar.certification import distances, traces
from jaxpar.components.weight import RULES
from jaxpar.config import Config, ConfigError, Glu, replace
from jaxpar.config.config_file import load_config
from jaxpar.config.layout.moment_blocks import split_sizes
from jaxpar.config.validate import resolve
from jaxpar.model.parameters import specs_of
from jaxpar.optimizer.blockwise import (
    Blocks,
    DynamicCode,
    blocks_of,
    dequantize,
    is_quantized,
    quantize,
)
from jaxpar.optimizer.schedules import learning_rate
from jaxpar.sharding.axes import FSDP_AXES, TENSOR
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.state import bytes_per_device, init_state
from jaxpar.step.train_step import make_train_step
from tests.optimizer.updates import gradients, weights_after
from tests.slow import slow
from tests.tiny import SMALL

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

CODES = {signed: DynamicCode(signed) for signed in (True, False)}

#: Some moments are in 8 bits, with blocks along all kinds of dims, and some are too small.
BASE = replace(
    SMALL,
    **{
        "model.d_model": 64,
        "model.layers.mixer.head_dim": 16,
        "model.layers.feed_forward": Glu(128, bias=True),
        "model.init_std": 0.2,
        "optimizer.learning_rate": 3e-3,
        "optimizer.warmup_steps": 0,
        "optimizer.moment_block": 32,
    },
)
FIRST = {"optimizer.first_moment_dtype": "8bit"}
BOTH = FIRST | {"optimizer.second_moment_dtype": "8bit"}
STAGES = {
    "parallel.pipeline": 2,
    "parallel.num_microbatches": 2,
    "parallel.zero": 1,
}
MESHES = {
    "one device": {},
    "sharded": {"parallel.data": 2, "parallel.tensor": 2},
    "stages": {**STAGES, "parallel.virtual_stages": 2},
    "unequal": {**STAGES, "parallel.layers_per_stage": (3, 1)},
    "offloaded": {"parallel.data": 2, "optimizer.offload": True},
}
RULES_OF = {"adamw": BOTH, "lion": FIRST | {"optimizer.name": "lion"}}
STEPS = 4


def ready(devices, **fields):
    """A resolved config and its mesh."""
    cfg = replace(BASE, **fields)
    p = cfg.parallel
    n = p.pipeline * p.data * p.tensor
    return resolve(cfg, n), make_mesh(p, devices[:n])


# ------------------------------------------------------------------------------ the code


def edges_of(signed: bool) -> np.ndarray:
    """The ends of the code's intervals above 0, the first of which begins at 0."""
    edges = [np.zeros(1)]
    for decade in range(signed, 7):
        parts = np.linspace(0.1, 1, 2 ** (decade + 1 - signed) + 1)
        edges.append(10.0 ** (decade - 6) * parts[decade > signed :])
    return np.concatenate(edges)


def read_as(x: np.ndarray, signed: bool) -> np.ndarray:
    """The numbers that the code has for others, by its definition, float64."""
    edges = edges_of(signed)
    middles = (edges[1:] + edges[:-1]) / 2
    middles[0] = 0
    size = np.abs(x.astype(np.float64))
    found = middles[np.clip(np.searchsorted(edges, size, side="right") - 1, 0, len(middles) - 1)]
    found = np.where(size > (middles[-1] + 1) / 2, 1, found)
    if not signed:
        found = np.where(size > 0, np.maximum(found, middles[1]), found)
    return np.sign(x) * found


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_is_read_as_the_middle_of_its_interval(signed):
    code, edges = CODES[signed], edges_of(signed)
    x = 10.0 ** np.random.default_rng(0).uniform(-9, 0, 20000)
    near = np.min(abs(edges[1:] - x[:, None]) / edges[1:], axis=1)
    x = np.concatenate([x[near > 1e-4], [0, 1]]).astype(np.float32)
    x = np.concatenate([x, -x]) if signed else x
    there_and_back = jax.jit(lambda x: code.decode(code.encode(x)))
    found = np.asarray(there_and_back(x))
    np.testing.assert_allclose(found, read_as(x, signed), rtol=2e-5)
    np.testing.assert_array_equal(there_and_back(found), found)


def test_the_code_has_its_numbers_and_is_symmetric():
    every = np.arange(256, dtype=np.uint8)
    signed, unsigned = (np.asarray(CODES[s].decode(every)) for s in (True, False))
    assert len(np.unique(unsigned)) == 256 and len(np.unique(signed)) == 255
    assert sorted(signed) == sorted(-signed)
    powers = [10.0**-n for n in range(8)]
    numbers = [int(((unsigned > a) & (unsigned < b)).sum()) for b, a in itertools.pairwise(powers)]
    assert numbers == [128, 64, 32, 16, 8, 4, 2]
    assert (CODES[True].encode(CODES[True].decode(every)) == every).sum() == 255  # -0 is 0


@pytest.mark.parametrize("blocks", [Blocks(2, 16), Blocks(1, 32)])
def test_blocks_scale_alone_and_zeros_stay(blocks):
    x = np.random.default_rng(0).normal(size=(3, 64, 32)).astype(np.float32)
    x[0] *= 1e-30
    x[1] = 0
    kept = quantize(x, blocks, CODES[True])
    found = np.asarray(dequantize(kept, CODES[True]))
    assert (kept["codes"].dtype, kept["scales"].dtype) == (np.uint8, np.float32)
    assert kept["scales"].size * blocks.size == x.size
    # Numbers of a decade below 1 are 0.9/64 apart.
    largest = np.abs(x).max(axis=(1, 2), keepdims=True)
    assert (abs(found - x) <= 0.5 * 0.9 / 64 * 1.001 * largest).all()
    assert not found[1].any() and found[0].any()
    again = quantize(found, blocks, CODES[True])
    assert all(np.array_equal(again[n], kept[n]) for n in kept)


# ---------------------------------------------------------------------------- the blocks

CONFIGS = ["llama_1b", "llama3_8b", "qwen3_30b_a3b", "deepseek_v3", "llama4_scout", "gpt3_175b"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mesh_can_split_only_blocks_that_the_rule_checks(name):
    cfg = load_config(name)
    checked = {(size, axes) for _, size, axes in split_sizes(cfg.model, cfg.parallel)}
    elements, divided = 0, 0
    for spec in flat(specs_of(cfg)).values():
        elements += math.prod(spec.shape)
        if (blocks := blocks_of(spec, cfg.optimizer)) is None:
            continue
        divided += math.prod(spec.shape)
        assert blocks.dim >= spec.lead and spec.shape[blocks.dim] % blocks.size == 0
        if axes := RULES[spec.axes[blocks.dim]]:
            assert axes in (FSDP_AXES, (TENSOR,))
            assert (spec.shape[blocks.dim], tuple(f"parallel.{a}" for a in axes)) in checked
    assert divided > 0.99 * elements


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"optimizer.name": "muon"}, r"first_moment_dtype.*is for adamw and lion, not muon"),
        ({"optimizer.moment_block": 8}, "moment_block.*must be at least 16"),
        ({"parallel.data": 4}, r"blocks of 32 of the 64 elements of model.d_model.*--optimizer.m"),
        ({"parallel.tensor": 8, "model.*.mixer.num_heads": 8, "model.*.mixer.num_kv_heads": 8},
         r"layers.feed_forward.d_ff, which parallel.tensor = 8 would split.*moment-block 16"),
    ],
)  # fmt: skip
def test_what_cannot_be_in_8_bits_is_refused(fields, rule):
    cfg = replace(BASE, **(FIRST | fields))
    with pytest.raises(ConfigError, match=rule):
        resolve(cfg, cfg.parallel.data * cfg.parallel.tensor)


# ---------------------------------------------------------------------------- the update


@pytest.fixture(scope="module")
def weights(devices):
    """Fields of the config -> weights after each of some updates, as in test_moments.py."""

    @functools.cache
    def run(fields: frozenset) -> list[traces.Arrays]:
        return weights_after(*ready(devices, **dict(fields)), STEPS)

    return lambda **fields: run(frozenset(fields.items()))


def rounded(x: np.ndarray, blocks: Blocks | None, signed: bool) -> np.ndarray:
    """A moment after quantization: in plain numpy, block by block, by the definition."""
    if blocks is None:
        return x
    rows = np.moveaxis(x, blocks.dim, -1)
    cut = rows.reshape(-1, blocks.size)
    scales = np.abs(cut).max(axis=1, keepdims=True)
    relative = cut / np.where(scales > 0, scales, 1)
    found = (read_as(relative, signed) * scales).astype(np.float32)
    return np.moveaxis(found.reshape(rows.shape), -1, blocks.dim)


def plain_updates(cfg: Config, devices) -> list[dict[str, np.ndarray]]:
    """Weights after each update by AdamW or Lion in float32, with rounded moments."""
    o, specs = cfg.optimizer, flat(specs_of(cfg))
    params = flat(jax.device_get(init_state(cfg, make_mesh(cfg.parallel, devices[:1])).params))
    rate = learning_rate(o, cfg.train.num_steps)
    m = {n: np.zeros_like(p) for n, p in params.items()}
    v, after = dict(m), []
    for step in range(STEPS):
        grads = flat(gradients(jax.tree.map(np.zeros_like, nested(params)), step))
        for n, g in grads.items():
            blocks, decay = blocks_of(specs[n], o), o.weight_decay * specs[n].decay
            if o.name == "lion":
                direction = np.sign(o.beta1 * m[n] + (1 - o.beta1) * g)
                moment = o.beta2 * m[n] + (1 - o.beta2) * g
            else:
                moment = o.beta1 * m[n] + (1 - o.beta1) * g
                second = o.beta2 * v[n] + (1 - o.beta2) * g * g
                hat = second / (1 - o.beta2 ** (step + 1))
                direction = moment / (1 - o.beta1 ** (step + 1)) / (np.sqrt(hat) + o.eps)
                v[n] = rounded(second, blocks, False)
            m[n] = rounded(moment, blocks, True)
            params[n] = params[n] - np.float32(rate(step)) * (direction + decay * params[n])
        after.append(dict(params))
    return after


def nested(params: dict[str, np.ndarray]) -> dict:
    """The tree of named arrays."""
    tree: dict = {}
    for name, array in params.items():
        *folders, leaf = name.split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), folders, tree)[leaf] = array
    return tree


def distance(found: list, wanted: list) -> float:
    """Mean error of the last weights by their mean change since the first update; the worst."""
    return distances.worst(distances.update_errors(found[-1], wanted[-1], wanted[0]))[0]


@pytest.mark.parametrize("name", ["adamw", slow("lion")])
def test_the_update_is_that_of_plain_numpy(devices, weights, name):
    cfg, _ = ready(devices, **RULES_OF[name])
    found, wanted = weights(**RULES_OF[name]), plain_updates(cfg, devices)
    assert distance(found, wanted) < 1e-5
    # Without the rounding, it is not: the test sees it.
    exact = weights(**{k: v for k, v in RULES_OF[name].items() if k == "optimizer.name"})
    assert distance(exact, wanted) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "name"),
    [*itertools.product([mesh for mesh in MESHES if mesh != "one device"], RULES_OF)],
)
def test_every_mesh_has_the_same_blocks(weights, mesh, name):
    assert distance(weights(**RULES_OF[name], **MESHES[mesh]), weights(**RULES_OF[name])) < 1e-6


def trained(devices, **fields):
    """The logical weights before and after three steps of training.

    The loss of the second is not finite, since a norm's gain is NaN for that step.
    """
    cfg, mesh = ready(devices, **BOTH, **{"optimizer.clip_norm": 0.1}, **fields)
    state, step = init_state(cfg, mesh), make_train_step(cfg, mesh)
    weights = [jax.device_get(traces.logical(state.params, cfg))]
    for i in range(3):
        gain, before = state.params["final_norm"], jax.device_get(state.opt_state)
        if i == 1:
            kept = gain.copy()
            state = with_gain(state, jax.device_put(gain * np.float32(np.nan), gain.sharding))
        batch = traces.shard_batch(traces.random_batch(cfg, i), cfg, mesh)
        state, metrics = step(state, batch)
        assert int(metrics["in_a_row"]) == (i == 1)
        if i == 1:
            chex.assert_trees_all_equal(jax.device_get(state.opt_state), before)
            state = with_gain(state, kept)
        else:
            assert float(metrics["grad_norm"]) > 0.1  # is clipped
    return [*weights, jax.device_get(traces.logical(state.params, cfg))]


def with_gain(state, gain):
    """A state with another gain of the last norm."""
    return dataclasses.replace(state, params=state.params | {"final_norm": gain})


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_train_steps_clip_and_skip_alike(devices, zero):
    found = trained(devices, **MESHES["sharded"], **{"parallel.zero": zero})
    wanted = trained(devices)
    assert distances.worst(distances.update_errors(found[1], wanted[1], wanted[0]))[0] < 1e-5


@pytest.mark.parametrize(("name", "most"), [("adamw", 12), slow("lion", 8)], ids=["adamw", "lion"])
def test_a_state_takes_a_byte_for_each_moment_and_a_scale_for_each_block(devices, name, most):
    cfg, mesh = ready(devices, **RULES_OF[name])
    state = init_state(cfg, mesh)
    wanted = sum(
        a.nbytes for a in jax.tree.leaves((state.step, state.extra["guard"], state.params))
    )
    wanted += sum(a.nbytes for a in jax.tree.leaves(state.opt_state) if a.ndim == 0)
    moments, divided = 2 if name == "adamw" else 1, 0
    for spec in flat(specs_of(cfg)).values():
        blocks, n = blocks_of(spec, cfg.optimizer), math.prod(spec.shape)
        wanted += moments * (4 * n if blocks is None else n + 4 * n // blocks.size)
        divided += blocks is not None
    assert bytes_per_device(state) == wanted
    assert divided >= 6
    found = jax.tree.leaves(state.opt_state, is_leaf=is_quantized)
    assert sum(map(is_quantized, found)) == moments * divided
    assert bytes_per_device(state) < most * sum(a.size for a in jax.tree.leaves(state.params))
