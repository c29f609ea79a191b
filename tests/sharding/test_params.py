"""Trees of parameter specs: what is derived from them, and their two halves put together again."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxpar.sharding import params
from jaxpar.sharding.axes import FSDP_AXES
from jaxpar.sharding.initial_values import initialize
from jaxpar.sharding.params import ParamSpec

SPECS = {
    "embed": ParamSpec(shape=(6, 4), axes=("vocab", "embed"), std=0.5),
    "layers": {
        "norm": ParamSpec(shape=(2, 4), axes=("layer", "norm"), init="ones", decay=False),
        "w": ParamSpec(shape=(2, 4, 8), axes=("layer", "embed", "mlp"), trainable=False),
    },
}


def test_everything_comes_from_the_specs():
    assert params.count(SPECS) == 24 + 8 + 64
    assert list(params.flat(SPECS)) == ["embed", "layers/norm", "layers/w"]
    assert params.flat(params.decay_mask(SPECS)) == {
        "embed": True,
        "layers/norm": False,
        "layers/w": True,
    }
    specs = params.flat(params.partition_specs(SPECS))
    assert specs["layers/w"] == PartitionSpec("pipeline", FSDP_AXES, "tensor")
    shapes = params.flat(params.abstract(SPECS))
    assert (shapes["embed"].shape, shapes["embed"].dtype) == ((6, 4), jnp.float32)


def test_initial_values_have_the_shapes_and_deviations_of_the_specs():
    big = {**SPECS, "embed": ParamSpec(shape=(200, 100), axes=("vocab", "embed"), std=0.5)}
    make = jax.jit(functools.partial(initialize, big))
    made = make(3)
    assert jax.tree.map(lambda a: a.shape, made) == params.map_specs(lambda s: s.shape, big)
    assert float(jnp.std(made["embed"])) == pytest.approx(0.5, rel=0.02)
    assert abs(float(jnp.mean(made["embed"]))) < 0.01
    assert (made["layers"]["norm"] == 1).all()
    assert (make(3)["embed"] == made["embed"]).all()
    assert not (make(4)["embed"] == made["embed"]).any()


def test_a_tree_is_split_by_what_is_trained_and_joined_again():
    tree = params.map_specs(lambda spec: spec.std, SPECS)
    trained, rest = params.split(tree, SPECS)
    assert list(params.flat(trained)) == ["embed", "layers/norm"]
    assert list(params.flat(rest)) == ["layers/w"]
    assert params.join(trained, rest) == tree
    assert params.join(({"a": 1}, {"b": 2}), ({"c": 3}, {})) == ({"a": 1, "c": 3}, {"b": 2})
    assert params.join(({"a": 1},), {}) == ({"a": 1},)


def test_a_spec_has_an_axis_for_each_dimension():
    with pytest.raises(ValueError, match=r"shape \(2, 3\) and axes \('norm',\) differ in length"):
        ParamSpec(shape=(2, 3), axes=("norm",))
