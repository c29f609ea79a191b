"""What each remat policy keeps, read off the compiler's plan of buffers, and that it changes
nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxpar import parity
from jaxpar.axes import BATCH_SPEC
from jaxpar.batch import Batch
from jaxpar.config import Config, ConfigError, replace
from jaxpar.model.remat import named, saved_names
from jaxpar.parallel.mesh import make_mesh, shardings
from jaxpar.state import abstract_state, init_state, state_specs
from jaxpar.step import make_gradient_step
from jaxpar.validation import REMAT_NAMES, REMAT_POLICIES, resolve

#: Deep, so that what a layer keeps outweighs what one layer works with.
DEEP = replace(
    parity.float32(Config()),
    **{
        "model.num_layers": 128,
        "model.d_model": 32,
        "model.num_heads": 4,
        "model.num_kv_heads": 4,
        "model.head_dim": 8,
        "model.d_ff": 64,
        "model.vocab_size": 64,
        "model.init_std": 0.2,
        "data.seq_len": 64,
        "train.global_batch_size": 2,
        "parallel.data": 1,
    },
)

M = DEEP.model

#: float32 bytes per token and layer of each name: twice the table in `jaxpar/model/remat.py`.
BYTES = {
    "attn_norm": 4 * M.d_model,
    "qkv": 4 * (M.num_heads + 2 * M.num_kv_heads) * M.head_dim,
    "qk": 4 * (M.num_heads + M.num_kv_heads) * M.head_dim,
    "attn_out": 4 * M.num_heads * M.head_dim,
    "attn_lse": 4 * M.num_heads,
    "attn_residual": 4 * M.d_model,
    "mlp_norm": 4 * M.d_model,
    "gate_up": 4 * 2 * M.d_ff,
    "mlp_hidden": 4 * M.d_ff,
}

TOKENS_AND_LAYERS = DEEP.train.global_batch_size * DEEP.data.seq_len * M.num_layers


@pytest.fixture(scope="module", autouse=True)
def quick_compile():
    """Without LLVM's optimisations, which do not change the plan of buffers."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def mesh(devices):
    return make_mesh(DEEP.parallel, devices[:1])


@pytest.fixture(scope="module")
def temporary_bytes(mesh):
    """remat -> temporary bytes of the compiled gradient step."""
    abstract = lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)  # noqa: E731

    @functools.cache
    def measure(remat: str) -> int:
        cfg = resolve(replace(DEEP, **{"parallel.remat": remat}), 1)
        to = shardings(mesh, state_specs(cfg).params)
        params = jax.tree.map(abstract, abstract_state(cfg).params, to)
        shape = (cfg.train.global_batch_size, cfg.data.seq_len)
        ints = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
        lowered = make_gradient_step(cfg, mesh).lower(params, Batch(ints, ints, ints, ints))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    return measure


def test_policies_fall_in_memory(temporary_bytes):
    sizes = [temporary_bytes(policy) for policy in ("none", "dots", "attn_out", "full")]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4, sizes


@pytest.mark.parametrize("remat", ["none", "dots", *REMAT_NAMES])
def test_what_is_saved_costs_its_bytes(remat, temporary_bytes):
    """The slack: buffers are packed, so one as small as attn_lse can lie in another's gap."""
    extra = (temporary_bytes(remat) - temporary_bytes("full")) / TOKENS_AND_LAYERS
    names = saved_names(remat)
    expected = sum(BYTES[name] for name in names)
    if {"qkv", "qk"} <= set(names):
        expected -= BYTES["qk"]  # queries and keys before RoPE are then of no use
    assert 0 < extra == pytest.approx(expected, rel=0.05, abs=BYTES["attn_lse"])


def test_a_policy_is_its_list_of_names(temporary_bytes):
    assert temporary_bytes("attn_lse,attn_out") == temporary_bytes("attn_out")
    assert saved_names("attn_lse,qk") == ("attn_lse", "qk")


@pytest.fixture(scope="module")
def gradients(mesh):
    """(remat, layer_loop) -> loss and gradients of a small model that has every kind of value."""
    small = {"model.num_layers": 3, "model.num_kv_heads": 2, "model.qk_norm": True}
    base = replace(DEEP, **small)

    def compute(remat: str, loop: str):
        fields = {"parallel.remat": remat, "parallel.layer_loop": loop}
        cfg = resolve(replace(base, **fields), 1)
        batch = parity.place_batch(parity.random_batch(cfg), cfg, mesh)
        measured, grads = make_gradient_step(cfg, mesh)(init_state(cfg, mesh).params, batch)
        return float(measured.loss), parity.to_host(grads)

    return functools.cache(compute)


@pytest.mark.parametrize("loop", ["scan", "unroll"])
@pytest.mark.parametrize("remat", ["dots", "attn_out", "full", "qk,mlp_hidden"])
def test_gradients_do_not_depend_on_it(remat, loop, gradients):
    loss, grads = gradients(remat, loop)
    wanted_loss, wanted = gradients("none", "scan")
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    errors = parity.gradient_errors(grads, wanted)
    assert parity.worst(errors)[0] < 5e-6, errors


def test_unknown_names_are_refused():
    for remat in ("everything", "qkv,atn_out", "attn_out,", ""):
        with pytest.raises(ConfigError, match=r"parallel\.remat.*must be one of none, dots"):
            resolve(replace(DEEP, **{"parallel.remat": remat}), 1)
    with pytest.raises(AssertionError, match="atn_out"):
        named(jnp.zeros(1), "atn_out")


def test_every_policy_saves_known_names():
    assert set(BYTES) == set(REMAT_NAMES)
    for names in REMAT_POLICIES.values():
        assert set(names) <= set(REMAT_NAMES)
