"""Initial weights of small models, made once for all meshes, and the gradients there.

`init_params` compiles a generator for each array and mesh: up to half of the time of a test that
takes one gradient of a tiny model. Here, one program for all of them makes the same bits on one
device; that it and every mesh do is what tests/sharding/test_initial_values.py is for.
"""

import contextlib
import functools
import math
import os
from collections.abc import Iterator
from typing import Any

import flax.traverse_util
import jax
import numpy as np
from jax.sharding import Mesh

from jaxpar.certification import traces
from jaxpar.certification.traces import max_segments
from jaxpar.config import Config
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.initial_values import initial_values, leaf_keys
from jaxpar.sharding.mesh import shardings
from jaxpar.sharding.params import ParamSpec, flat, map_specs, partition_specs
from jaxpar.step import state
from jaxpar.step.train_step import make_gradient_step
from jaxpar.training import chosen, initial_weights

#: Numbers of the shortest row that a generator makes.
SHORTEST = 1 << 14


@contextlib.contextmanager
def optimizations(wanted: bool) -> Iterator[None]:
    """Compile with LLVM's optimizations, or without them."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, not wanted)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextlib.contextmanager
def as_programs_do() -> Iterator[None]:
    """Compile as in programs that tests start: their bits are the same."""
    with optimizations(os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") != "true"):
        yield


@contextlib.contextmanager
def quickly_made() -> Iterator[None]:
    """Make initial weights by `init_params` below."""
    made = state.init_params
    state.init_params = init_params
    try:
        yield
    finally:
        state.init_params = made


@functools.cache
def values_of(specs: tuple[tuple[str, ParamSpec], ...], seed: int) -> Any:
    """What `initialize` gives for a tree of specs, on the host.

    A number depends on its place in the array, not on the array's shape: one small program makes
    the numbers of every array of a standard deviation.
    """
    tree = flax.traverse_util.unflatten_dict(dict(specs), sep="/")
    return map_specs(_values, tree, leaf_keys(tree, seed))


def tree_of(specs: Any, seed: int) -> Any:
    """What `jaxpar.certification.traces.initial_params` gives."""
    return jax.device_put(values_of(tuple(flat(specs).items()), seed), jax.devices()[0])


def _values(spec: ParamSpec, key: jax.Array) -> np.ndarray:
    """The initial values of one array, on the host."""
    if spec.init in ("ones", "zeros"):
        return np.full(spec.shape, spec.init == "ones", np.float32)
    if spec.init != "normal":
        return np.asarray(initial_values(spec, key))
    size = math.prod(spec.shape)
    row = max(SHORTEST, 1 << (size - 1).bit_length())
    return np.asarray(_generator(row, spec.std)(key))[:size].reshape(spec.shape)


@functools.cache
def _generator(row: int, std: float):
    """A compiled generator of so many numbers."""
    spec = ParamSpec(shape=(row,), axes=("D",), std=std)
    return jax.jit(functools.partial(initial_values, spec))


def init_params(specs: Any, cfg: Config, mesh: Mesh) -> Any:
    """What `jaxpar.step.state.init_params` gives, without a program for each array and mesh."""
    values = values_of(tuple(flat(specs).items()), cfg.train.seed)
    to = shardings(mesh, partition_specs(specs))
    placed = jax.device_put(values, state.logical_shardings(values, to, cfg))
    return state.to_running(state.TrainState((), placed, ()), cfg).params


def first_gradients(cfg: Config, mesh: Mesh, batch: Batch) -> traces.TrainingTrace:
    """Loss and gradients of a batch at the initial weights, without a step."""
    params = init_params(param_specs(cfg.model, cfg.lora), cfg, mesh)
    measured, grads = make_gradient_step(cfg, mesh, max_segments(cfg))(
        params, traces.shard_batch(batch, cfg, mesh)
    )
    init = traces.logical(params, cfg)
    return traces.TrainingTrace(init, float(measured["loss"]), traces.logical(grads, cfg), [], init)


def plain_gradients(cfg: Config, batch: Batch) -> traces.TrainingTrace:
    """The same of the plain model on one device."""
    params = values_of(tuple(flat(param_specs(cfg.model, cfg.lora)).items()), cfg.train.seed)
    gradients = jax.jit(lambda p, b: traces.reference_gradients(p, b, cfg))
    loss, grads = gradients(params, batch)
    init = traces.to_host(params)
    return traces.TrainingTrace(init, float(loss), traces.to_host(grads), [], init)


def origin_of(cfg: Config) -> initial_weights.Origin | None:
    """Return the initial weights that a new run chooses, as its start does."""
    return initial_weights.find(cfg, chosen.choose(cfg, None).get(chosen.INITIAL))
