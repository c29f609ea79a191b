"""A change of structure changes no figure of a config: those that `figures.py` records."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxpar.config import QkNorm, replace
from tests.step import figures, figures_of
from tests.tiny import TINY

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads(figures.FIGURES.read_text("utf-8"))
FIGURES = RECORDED["figures"]

#: All but initial values, which are compiled.
QUICK = [part for part in figures_of.PARTS if part != "initial"]

of_this_jax = pytest.mark.skipif(
    RECORDED["jax"] != jax.__version__, reason=f"recorded with JAX {RECORDED['jax']}"
)


@pytest.mark.parametrize("name", figures_of.names())
def test_figures_of_a_config_are_the_recorded_ones(name):
    assert figures.differences(FIGURES, {name: figures_of.of_config(name, QUICK)}) == []


@pytest.mark.parametrize("name", figures_of.STATES)
def test_names_of_a_state_are_the_recorded_ones(name):
    found = {f"state, {name}": figures_of.of_state(name)}
    assert figures.differences(FIGURES, found) == []


@of_this_jax
@pytest.mark.slow
def test_initial_values_are_the_recorded_ones():
    """Apart, compiled as by users: their bits depend on LLVM's optimizations."""
    command = [sys.executable, "-m", "tests.step.figures", "--parts", "initial"]
    command += ["--only", *figures_of.COMPILED]
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "false"
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "8 configs and states, 0 figures changed" in run.stdout


def test_every_config_is_recorded():
    states = [f"state, {name}" for name in figures_of.STATES]
    assert list(FIGURES) == [*figures_of.names(), *states]
    assert all(list(FIGURES[name]) == figures_of.parts_of(name) for name in figures_of.names())


def test_a_difference_names_config_part_and_entry():
    found = copy.deepcopy({"llama3_8b": FIGURES["llama3_8b"]})
    found["llama3_8b"]["specs"]["head"] += "0"
    del found["llama3_8b"]["counts"]["params"]
    found["llama3_8b"]["plan"]["new"] = 1
    lines = figures.differences(FIGURES, found)
    assert [line.partition(" ->")[0].rpartition(": ")[0] for line in lines] == [
        "llama3_8b: specs: head",
        "llama3_8b: counts: params",
        "llama3_8b: plan: new",
    ]


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("specs", {"model.tie_embeddings": True}),
        ("specs", {"model.init_std": 0.1}),
        ("counts", {"model.layers.feed_forward.d_ff": 48}),
        ("plan", {"parallel.remat": "full"}),
        ("shrunk", {"model.layers.mixer.qk_norm": QkNorm()}),
        ("layout", {"model.layers.mixer.qk_norm": QkNorm()}),
        ("layout", {"model.layers.feed_forward.bias": True}),
        ("checkpoint", {"optimizer.name": "lion"}),
    ],
)
def test_a_change_of_a_config_changes_figures(part, changes):
    of = figures_of.PARTS[part]
    assert of(TINY) != of(replace(TINY, **changes))


def test_the_file_is_as_it_is_written():
    """So that a difference of two versions is a difference of figures."""
    assert figures.FIGURES.read_text("utf-8") == figures.as_text(FIGURES)
