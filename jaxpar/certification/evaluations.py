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

#: Texts of which one has to agree, if there are experts. Now and then, two experts have the same
#: score but for the rounding of float32, and a token goes to the other one: the loss of few texts.
#: A fault changes that of every text.
TEXTS = 3


def evaluations(subject: Subject) -> Iterator[Result]:
    """Compare the loss of held-out text on the first mesh, by the weights and by their average."""
    check, small = "evaluations", subject.small
    if objective_in(small) or small.train.loss:
        yield Result(check, "", "held-out loss", not_run="the loss is not that of the next token")
        return
    found = list[Result]()
    for seed in range(TEXTS if experts_in(small.model) else 1):
        found = list(_of_text(subject, seed))
        if all(result.passed for result in found):
            break
    yield from found


def _of_text(subject: Subject, seed: int) -> Iterator[Result]:
    """Compare the losses of one random text."""
    check, (name, cfg) = "evaluations", next(iter(subject.meshes.items()))
    rows = cfg.train.global_batch_size
    text = random_text(cfg, int(BATCHES * rows), 3 + seed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text.bin"
        text.tokens.astype("<u2").tofile(file)
        cfg = of_files(cfg, {"path": str(file), "held_out": str(file), "eos_id": END})
        evaluate = dataclasses.replace(cfg.evaluation, every=1, num_batches=10, sets=(), test=False)
        cfg = dataclasses.replace(cfg, evaluation=evaluate)
        mesh = mesh_of(cfg, subject.devices)
        loader = Loader(cfg, mesh, "val", functools.partial(order_of, cfg))
        held_out = HeldOut({HELD_OUT: loader})
        most = traces.max_segments(cfg) or loader.max_documents
        evaluation = Evaluation(cfg, mesh, held_out, most)
        state, weights = _with_average(init_state(cfg, mesh), cfg)
        found = evaluation(state, evaluation.due(1, at_end=False))
    sequences = [text.sequence(i) for i in range(text.num_sequences)]
    together = {n: np.stack([one[n] for one in sequences]) for n in sequences[0]}
    for what, params in weights.items():
        wanted = _plain_loss(params, together, cfg)
        if what not in found:
            yield Result(check, name, f"loss of {what}", np.inf, subject.tolerance, where="missing")
            continue
        error = abs(found[what].loss - wanted) / wanted
        yield Result(check, name, f"loss of {what}", error, subject.tolerance)


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
