"""Checkpoints of moments in 8 bits: codes and scales, on any mesh, and their conversion."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpar.checkpoint import stored_arrays
from jaxpar.checkpoint.loading import restore
from jaxpar.checkpoint.saved import checkpoint_folder
from jaxpar.model.parameters import trainable_specs
from jaxpar.optimizer import moments
from jaxpar.optimizer.blockwise import is_quantized
from jaxpar.sharding.params import flat
from jaxpar.step import state
from tests.checkpoint.test_checkpoint import TENSOR_2, VIRTUAL, assert_same_bits, logical, save
from tests.checkpoint.test_memory import OFFLOAD, setup
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

__all__ = ["setup"]  # the fixture

#: Matrices that are large enough for 8 bits, in blocks that two devices do not split.
WIDE = {
    "model.d_model": 64,
    "model.layers.mixer.head_dim": 16,
    "model.layers.feed_forward.d_ff": 128,
    "optimizer.moment_block": 32,
}
EIGHT = {f"optimizer.{name}_moment_dtype": "8bit" for name in ("first", "second")}
UNEQUAL = {
    "parallel.data": 1,
    "parallel.pipeline": 2,
    "parallel.layers_per_stage": (3, 1),
    "parallel.num_microbatches": 2,
    "parallel.zero": 1,
}


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({}, TENSOR_2),
        slow(VIRTUAL, UNEQUAL),
        slow(UNEQUAL | OFFLOAD, {}),
        slow(TENSOR_2, OFFLOAD),
    ],
)
def test_another_mesh_has_the_same_codes_and_scales(setup, then, now):
    cfg, mesh = setup(**WIDE, **EIGHT, **then)
    saved = save(cfg, mesh, 3)
    changed, other_mesh = setup(**WIDE, **EIGHT, **now)
    restored = restore(changed, other_mesh)
    to = state.state_shardings(changed, other_mesh)
    assert jax.tree.map(lambda a: a.sharding, restored) == to
    assert_same_bits(logical(restored, changed), logical(saved, cfg))
    names = stored_arrays.array_names(checkpoint_folder(cfg.run.dir) / "3")
    assert {f"opt_state/0/mu/layers/w_up/{kind}" for kind in ("codes", "scales")} <= set(names)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        slow({}, EIGHT),
        slow(EIGHT, {}),
        slow(EIGHT, EIGHT | {"optimizer.moment_block": 16}),
        slow(EIGHT | OFFLOAD, {"optimizer.second_moment_dtype": "bfloat16"}),
        slow({"optimizer.first_moment_dtype": "bfloat16"} | VIRTUAL, EIGHT | UNEQUAL),
    ],
)
def test_moments_are_converted_to_and_from_8_bits(setup, then, now):
    cfg, mesh = setup(**(WIDE | then))
    saved = logical(save(cfg, mesh, 3), cfg)
    changed, other_mesh = setup(**(WIDE | now))
    restored = restore(changed, other_mesh)
    to = state.state_shardings(changed, other_mesh)
    assert jax.tree.map(lambda a: a.sharding, restored) == to
    specs, o = flat(trainable_specs(changed)), changed.optimizer

    def wanted(field, name, kept):
        exact = moments.in_float32(field, jax.tree.map(np.asarray, kept))
        converted = jax.device_get(moments.stored(field, specs[name], exact, o))
        shapes = [jax.tree.map(np.shape, tree) for tree in (kept, converted)]
        return kept if shapes[0] == shapes[1] and is_quantized(kept) else converted

    converted = moments.map_moments(wanted, saved.params, saved.opt_state)
    found = logical(restored, changed)
    assert_same_bits(found, dataclasses.replace(saved, opt_state=converted))
    quantized = [name for name in flat(found.opt_state[0].nu) if name.endswith("/codes")]
    assert bool(quantized) == (changed.optimizer.second_moment_dtype == "8bit")
