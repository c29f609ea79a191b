"""Traced programs of a config, of every kind: steps, outer steps of DiLoCo, text generation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar.certification.traces import max_segments, random_batch, shard_batch
from jaxpar.config import Config, replace
from jaxpar.config.validate import resolve
from jaxpar.features.distillation.loss import likeliest
from jaxpar.inference import generation, harness_requests, speculative
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.diloco import outer
from jaxpar.step.forward import make_score_step, make_token_step
from jaxpar.step.state import abstract_state, state_shardings
from jaxpar.step.train_step import make_eval_step, make_gradient_step, make_train_step

#: Devices of a mesh, but for text generation.
DEVICES = 8

#: Rows, tokens of the longest prompt and slots of the cache, and the vocabulary of a tokenizer.
ROWS, PROMPT, SLOTS, VOCABULARY = 2, 128, 256, 250

GREEDY = generation.Sampling(temperature=0.0)


def trace(fields: dict, program: str) -> Any:
    """Trace a program.

    Args:     fields: of the config. program: of STEPS, OF_OUTER_STEPS or OF_TEXTS.
    Returns:  `jax.stages.Traced`.
    """
    cfg = replace(Config(), **fields)
    if program in OF_TEXTS:
        return OF_TEXTS[program](cfg)
    cfg = resolve(cfg, DEVICES)
    mesh = make_mesh(cfg.parallel)
    state = jax.tree.map(placed, abstract_state(cfg), state_shardings(cfg, mesh))
    if program in OF_OUTER_STEPS:
        made = OF_OUTER_STEPS[program](cfg, mesh, 1)
        return made.trace(*([] if program == "exchange" else [state.params]), state.extra["diloco"])
    batch = shard_batch(random_batch(cfg), cfg, mesh)
    batch = jax.tree.map(lambda a: placed(a, a.sharding), batch)
    takes_state = program in ("train", "loads", "exchanging")
    return STEPS[program](cfg, mesh).trace(state if takes_state else state.params, batch)


def placed(a: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """An abstract array on a mesh."""
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def _teacher(cfg: Config, mesh: Mesh) -> Any:
    return make_token_step(cfg, mesh, lambda top, x, mb: likeliest(top, x, cfg, 8, 2.0))


#: Programs of a batch: the state, or its parameters, and the batch.
STEPS: dict[str, Callable[[Config, Mesh], Any]] = {
    "train": lambda cfg, mesh: make_train_step(cfg, mesh, max_segments(cfg)),
    "eval": lambda cfg, mesh: make_eval_step(cfg, mesh, max_segments(cfg)),
    "gradient": lambda cfg, mesh: make_gradient_step(cfg, mesh, max_segments(cfg)),
    "loads": lambda cfg, mesh: make_train_step(cfg, mesh, requested=("expert_rows", "routing")),
    "exchanging": lambda cfg, mesh: make_train_step(cfg, mesh, fragment=1),
    "scores": make_score_step,
    "teacher": _teacher,
}

#: Programs of DiLoCo's outer weights, of the second fragment.
OF_OUTER_STEPS: dict[str, Callable[[Config, Mesh, int], Any]] = {
    "outer step": outer.make_outer_step,
    "begin": outer.make_begin,
    "exchange": outer.make_exchange,
    "apply": outer.make_apply,
}


def _sampling(cfg: Config, tensor: int, modules: bool = False) -> tuple[Config, Mesh, Any, Any]:
    """The config, mesh and parameters of a model that generates text, and its fused weights."""
    cfg = resolve(generation.config_for_sampling(cfg, tensor), tensor)
    mesh = make_mesh(cfg.parallel, jax.devices()[:tensor])
    to = state_shardings(cfg, mesh).params
    params = jax.tree.map(placed, abstract_state(cfg).params, to)
    fuse = jax.jit(lambda p: generation.weights_for_sampling(p, cfg, mesh, modules=modules))
    return cfg, mesh, fuse.trace(params), jax.eval_shape(fuse, params)


def _generation(cfg: Config, tensor: int, modules: bool) -> tuple[Any, tuple, jax.ShapeDtypeStruct]:
    """The programs of text generation, what they start with, and lengths of prompts."""
    cfg, mesh, _, weights = _sampling(cfg, tensor, modules)
    make = speculative.make_programs if modules else generation.make_programs
    made = make(cfg, mesh, GREEDY, slots=SLOTS, vocab_size=VOCABULARY)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    tokens, lengths, numbers = ints(ROWS, PROMPT), ints(ROWS), ints(ROWS)
    return made, (weights, tokens, lengths, *([] if modules else [numbers])), lengths


def _prefill(cfg: Config, tensor: int = 1, modules: bool = False) -> Any:
    made, prompts, _ = _generation(cfg, tensor, modules)
    return made.start.trace(*prompts)


def _tokens(cfg: Config, tensor: int = 1, modules: bool = False) -> Any:
    made, prompts, lengths = _generation(cfg, tensor, modules)
    rows = jax.eval_shape(made.start, *prompts)
    return made.go_on.trace(prompts[0], rows, *([lengths] if modules else []))


def _scoring(cfg: Config, tensor: int) -> Any:
    cfg, mesh, _, weights = _sampling(cfg, tensor)
    return harness_requests.make_scores(cfg, mesh, VOCABULARY).trace(
        weights, jax.ShapeDtypeStruct((ROWS, PROMPT + 1), jnp.int32)
    )


#: Programs of text generation, on one device or two.
OF_TEXTS: dict[str, Callable[[Config], Any]] = {
    "fuse": lambda cfg: _sampling(cfg, 2, modules=cfg.model.mtp_depth > 0)[2],
    "prefill": _prefill,
    "tokens": _tokens,
    "prefill, tensor": lambda cfg: _prefill(cfg, 2),
    "tokens, tensor": lambda cfg: _tokens(cfg, 2),
    "drafts, prefill": lambda cfg: _prefill(cfg, modules=True),
    "drafts, rounds": lambda cfg: _tokens(cfg, 2, modules=True),
    "scoring": lambda cfg: _scoring(cfg, 2),
}
