"""What components declare: the fused layout, points, and nothing of JAX."""

import dataclasses
import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpar.config
import jaxpar.extend
from jaxpar import components
from jaxpar.components.component import Component
from jaxpar.components.experts import Experts
from jaxpar.components.weight import RULES, either_way, fused, spread
from jaxpar.config.config_file import load_config
from jaxpar.config.layers import OURS
from jaxpar.model.fused_weights import dims_of, matrices_of
from tests.step.figures_of import names

SHIPPED = names()


def layers_of(name: str):
    model = load_config(name).model
    return model, [*model.distinct, *[model.module_layer] * (model.mtp_depth > 0)]


@pytest.mark.parametrize("name", SHIPPED)
def test_weights_of_shipped_configs(name):
    """Each is in one array of the fused layout, has an axis for each dim, and all arrays of one
    fused array are alike."""
    model, layers = layers_of(name)
    for layer in layers:
        weights = layer.weights(model)
        for w in map(spread, weights.values()):
            assert len(w.shape) == len(w.axes) and set(w.axes) <= RULES.keys()
        for gate_up in (False, True):
            arrays = fused(weights, gate_up=gate_up)
            assert sorted(n for a in arrays.values() for n, _ in a.parts) == sorted(weights)
            assert arrays.keys() <= either_way(weights).keys()
            for array in arrays.values():
                same = ("inputs", "float8", "to_stream", "converts_late", "rank")
                for _, w in array.parts:
                    assert [getattr(w, f) for f in same] == [getattr(array.first, f) for f in same]
        dims = dims_of(layer, model)
        assert all(dims[n] is not None for n in matrices_of(layer, model))


def test_layers_of_one_name_have_the_same_weights():
    for name in SHIPPED:
        model, _ = layers_of(name)
        for stack in model.stacks.values():
            assert all(layer.weights(model) == stack[0].weights(model) for layer in set(stack))


def test_points_are_those_of_the_components():
    model, (layer,) = layers_of("qwen3_30b_a3b")
    assert all(map(layer.has_point, ("queries", "choice", "routing", "layer", "mixer_output")))
    assert isinstance(layer.feed_forward, Experts)
    alone = dataclasses.replace(layer, mixer=None)
    assert alone.has_point("routing") and not alone.has_point("queries")
    assert not alone.has_point("mixer_input")
    assert "wqkv" not in dims_of(alone, model)


def test_components_import_no_jax():
    code = "import sys, jaxpar.config; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_methods_in_pytorch_are_those_of_the_components():
    """torch_model.py imports nothing of jaxpar, so it has copies."""
    script = Path(__file__).parents[2] / "scripts" / "docs" / "torch_methods.py"
    found = runpy.run_path(str(script))
    assert found["page"]() == found["FILE"].read_text("utf-8"), f"run {script.name} --write"


def test_every_kind_is_found_in_the_one_list():
    """The list in components/__init__.py has what its files declare, but for base classes."""
    files = [importlib.import_module(one.__module__) for one in OURS.values()]
    declared = {
        name
        for file in files
        for name, cls in vars(file).items()
        if isinstance(cls, type) and issubclass(cls, Component) and cls.__module__ == file.__name__
    }
    assert declared == OURS.keys()
    assert OURS.keys() - set(components.__all__) == {"Recurrent"}
    for package in (jaxpar.config, jaxpar.extend):
        assert set(components.__all__) <= set(package.__all__)
