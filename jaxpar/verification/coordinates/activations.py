"""The size of activations of each kind of layer, before and after a few training steps."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpar.config import Config, replace
from jaxpar.config.layout.composition import model_of
from jaxpar.model.plain import decoder
from jaxpar.sharding.batch import Batch
from jaxpar.step.state import init_state, to_logical
from jaxpar.step.train_step import make_train_step
from jaxpar.verification import traces

#: The kinds, in the order of a forward pass.
KINDS = ("embedding", "attention", "feed-forward", "last layer", "logits")


@dataclass(frozen=True)
class ActivationSizes:
    """Mean magnitudes at one width, by kind."""

    start: dict[str, float]
    """At the initial weights."""
    end: dict[str, float]
    """After the last step."""
    change: dict[str, float]
    """Of the difference of both."""


def activations(params: Any, batch: Batch, cfg: Config) -> dict[str, jax.Array]:
    """Compute the activations of each kind with the plain model, float32.

    attention and feed-forward are what the branches add to the residual stream, of all layers.
    """
    model, segments = model_of(cfg.model), jnp.asarray(batch.segment_ids)
    if not cfg.data.document_mask:
        segments = jnp.ones_like(segments)
    x = first = decoder.first_stream(params, batch.tokens, batch.positions, model)
    attention, feed_forward = [], []
    for layer, w in decoder.layers_of(params, model):
        place = w, layer, batch.positions, segments, model
        between, after = decoder.after_mixer(x, *place), decoder.block(x, *place)
        attention.append(between - x)
        feed_forward.append(after - between)
        x = after
    logits = decoder.output(x, params, model)
    found = first, jnp.stack(attention), jnp.stack(feed_forward), x, logits
    return dict(zip(KINDS, found, strict=True))


def measure(cfg: Config, mesh: Mesh, steps: int, seeds: int) -> ActivationSizes:
    """Train some steps on one batch, and return the sizes of activations, averaged over seeds.

    Args:     cfg: resolved for the mesh of one device.
    """
    batch = traces.random_batch(cfg)
    placed = traces.shard_batch(batch, cfg, mesh)
    train: Any = make_train_step(cfg, mesh, None)
    state = init_state(cfg, mesh)
    options = traces.QUICK_COMPILE if mesh.devices.flat[0].platform == "cpu" else None
    step = train.lower(state, placed).compile(compiler_options=options)
    forward = jax.jit(functools.partial(activations, cfg=cfg))
    mean = lambda found: {kind: float(jnp.mean(jnp.abs(a))) for kind, a in found.items()}  # noqa: E731
    rows = []
    for seed in range(seeds):
        state = init_state(replace(cfg, **{"train.seed": cfg.train.seed + seed}), mesh)
        start = forward(to_logical(state, cfg).params, batch)
        for _ in range(steps):
            state, _ = step(state, placed)
        end = forward(to_logical(state, cfg).params, batch)
        change = {kind: end[kind] - start[kind] for kind in KINDS}
        rows.append((mean(start), mean(end), mean(change)))
    return ActivationSizes(*map(_mean_over_seeds, zip(*rows, strict=True)))


def _mean_over_seeds(rows: tuple[dict[str, float], ...]) -> dict[str, float]:
    return {kind: float(np.mean([row[kind] for row in rows])) for kind in KINDS}
