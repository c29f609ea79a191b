"""The check of evaluations: held-out losses of a run, against the plain model's."""

import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from jaxpar.certification import traces
from jaxpar.certification.data_order import END, of_files, random_text
from jaxpar.certification.results import Result, Subject
from jaxpar.certification.traces import Arrays
from jaxpar.certification.updates import mesh_of
from jaxpar.components.experts import experts_in
from jaxpar.config import Config
from jaxpar.config.lists.datasets import HELD_OUT
from jaxpar.config.schema.features import objective_in
from jaxpar.config.schema.optimizer import AVERAGED
from jaxpar.data.loader import Loader
from jaxpar.model.parameters import specs_of
from jaxpar.model.plain import decoder
from jaxpar.parallel.context import order_of
from jaxpar.sharding.batch import IGNORED
from jaxpar.sharding.params import split
from jaxpar.step.state import TrainState, init_state
from jaxpar.training.evaluation import Evaluation, HeldOut

#: Batches of the text, of which the last is completed by rows without labels.
BATCHES = 2.5

#: Random texts to choose from, if there are experts: one in which no two experts have nearly the
#: same score for a token, which the rounding of float32 would then send to either.
TEXTS = 5

#: How much `_is_decided` moves each weight, eight units in the last place of float32; how often.
MOVED, SAMPLES = 2.0**-21, 3


def evaluations(subject: Subject) -> Iterator[Result]:
    """Compare the loss of held-out text on the first mesh, by the weights and by their average."""
    check, small = "evaluations", subject.small
    if objective_in(small) or small.train.loss:
        yield Result(check, "", "held-out loss", not_run="the loss is not that of the next token")
        return
    name, cfg = next(iter(subject.meshes.items()))
    mesh = mesh_of(cfg, subject.devices)
    state, weights = _with_average(init_state(cfg, mesh), cfg)
    for seed in range(TEXTS):
        text = random_text(cfg, int(BATCHES * cfg.train.global_batch_size), 3 + seed)
        sequences = [text.sequence(i) for i in range(text.num_sequences)]
        together = {n: np.stack([one[n] for one in sequences]) for n in sequences[0]}
        wanted = {what: _plain_loss(params, together, cfg) for what, params in weights.items()}
        decided = (_is_decided(weights[w], wanted[w], together, subject, cfg) for w in weights)
        if not experts_in(small.model) or all(decided):
            break
    else:
        why = f"in each of {TEXTS} texts, experts have the same score for a token but for rounding"
        yield Result(check, name, "held-out loss", not_run=why)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text.bin"
        text.tokens.astype("<u2").tofile(file)
        cfg = of_files(cfg, {"path": str(file), "held_out": str(file), "eos_id": END})
        evaluate = dataclasses.replace(cfg.evaluation, every=1, num_batches=10, sets=(), test=False)
        cfg = dataclasses.replace(cfg, evaluation=evaluate)
        loader = Loader(cfg, mesh, "val", functools.partial(order_of, cfg))
        held_out = HeldOut({HELD_OUT: loader})
        most = traces.max_segments(cfg) or loader.max_documents
        evaluation = Evaluation(cfg, mesh, held_out, most)
        found = evaluation(state, evaluation.due(1, at_end=False))
    for what, loss in wanted.items():
        if what not in found:
            yield Result(check, name, f"loss of {what}", np.inf, subject.tolerance, where="missing")
            continue
        error = abs(found[what].loss - loss) / loss
        yield Result(check, name, f"loss of {what}", error, subject.tolerance)


def _is_decided(
    params: Arrays, loss: float, text: dict[str, np.ndarray], subject: Subject, cfg: Config
) -> bool:
    """Return whether the plain model's loss stays when weights move by some roundings of float32.

    Args:     loss: of the weights as they are.
    """
    rng = np.random.default_rng(0)
    for _ in range(SAMPLES):
        moved = {n: a * (1 + MOVED * rng.choice([-1.0, 1.0], a.shape)) for n, a in params.items()}
        if abs(_plain_loss(moved, text, cfg) - loss) > subject.tolerance * loss:
            return False
    return True


def _with_average(state: TrainState, cfg: Config) -> tuple[TrainState, dict[str, Arrays]]:
    """Return a state whose average differs from its weights, and both by what is evaluated."""
    weights = {HELD_OUT: traces.logical(state.params, cfg)}
    if not cfg.optimizer.ema:
        return state, weights
    trained, _ = split(state.params, specs_of(cfg))
    other = jax.tree.map(lambda a: jax.device_put(1.25 * np.asarray(a), a.sharding), trained)
    average = traces.logical(other, cfg)
    weights[AVERAGED] = weights[HELD_OUT] | average
    return state.with_extra(**{AVERAGED: other}), weights


def _plain_loss(params: Arrays, text: dict[str, np.ndarray], cfg: Config) -> float:
    """Compute the mean cross entropy over all labels with the plain model, in float64."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        tree: Any = {n: np.asarray(a, np.float64) for n, a in params.items()}
        tree = decoder.scale_adapters(flax.traverse_util.unflatten_dict(tree, sep="/"), cfg)

        @traces.quick_jit
        def scores(tree: Any, tokens: Any, positions: Any, segments: Any) -> jax.Array:
            logits = decoder.logits_of(tree, tokens, positions, segments, cfg.model)
            return jax.nn.log_softmax(logits)

        of_text = scores(tree, text["tokens"], text["positions"], text["segment_ids"])
    labels = text["labels"]
    at_label = np.take_along_axis(np.asarray(of_text), np.maximum(labels, 0)[..., None], -1)[..., 0]
    return float(-at_label[labels != IGNORED].mean())
